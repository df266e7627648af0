"""One agent of a lockstep fleet, trained by a plain loop, by Lightning or by the Trainer of Hugging Face."""

import json
import sys
import threading
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SEEDED = threading.Lock()  # agents may be threads of one process


def model_and_data(agent):
    with SEEDED:
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        torch.manual_seed(10 + agent)
        return model, torch.randn(40, 6), torch.randint(3, (40,))


class Supervised(nn.Module):
    """A model whose forward pass returns its loss, as the Trainer expects."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, labels):
        output = self.model(x)
        return {"loss": nn.functional.cross_entropy(output, labels), "logits": output}


def plain(options, agent):
    import caden

    model, x, y = model_and_data(agent)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    member = caden.Agent(nn.ModuleDict({"model": model}), optimizer, **options)  # names as in the others
    for _ in range(3):
        for a in range(0, 40, 8):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[a : a + 8]), y[a : a + 8]).backward()
            optimizer.step()
    member.finish()
    return model


def by_lightning(options, agent):
    import lightning.pytorch as lightning

    from caden.own_loop.lightning import AgentCallback

    model, x, y = model_and_data(agent)

    class Task(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch, index):
            return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = lightning.Trainer(
        max_epochs=3, accelerator="cpu", devices=1, callbacks=[AgentCallback(**options)], **quiet
    )
    trainer.fit(Task(), DataLoader(TensorDataset(x, y), batch_size=8))
    return model


def by_transformers(options, agent):
    from transformers import Trainer, TrainingArguments

    from caden.own_loop.transformers import AgentCallback

    model, x, y = model_and_data(agent)
    folder = Path(options["directory"])
    arguments = TrainingArguments(
        output_dir=str(folder.parent / f"trainer-{agent}"),
        num_train_epochs=3,
        per_device_train_batch_size=8,
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
    )
    data = [{"x": a, "labels": b} for a, b in zip(x, y)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(
        model=Supervised(model),
        args=arguments,
        train_dataset=data,
        optimizers=(optimizer, None),
        callbacks=[AgentCallback(**options)],
    )
    trainer.train()
    return model


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of the packages
    kind, fleet, agent, out = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    options = {"fleet": fleet, "agent": agent, "directory": out / f"{kind}-{agent}"}
    trained = {"plain": plain, "lightning": by_lightning, "transformers": by_transformers}[kind](options, agent)
    (out / f"{kind}-{agent}.json").write_text(json.dumps([p.tolist() for p in trained.parameters()]))
