"""The methods: each file reads like its paper. A line here adds a file's methods to the registry.

Default parameters are starting points for networks like the embedded digits network; tune them for anything else.
"""

from caden.methods._accelerated import accelerated as accelerated
from caden.methods._adapd import adapd as adapd
from caden.methods._admm_edges import admm_edges as admm_edges
from caden.methods._atg import atg as atg
from caden.methods._c2eden import c2eden as c2eden
from caden.methods._caden import caden as caden
from caden.methods._caden import caden_gd as caden_gd
from caden.methods._choco import beer as beer
from caden.methods._choco import choco as choco
from caden.methods._clipped_gossip import clipped_gossip as clipped_gossip
from caden.methods._dgd import dgd as dgd
from caden.methods._diloco import diloco as diloco
from caden.methods._diloco import noloco as noloco
from caden.methods._dinno import dinno as dinno
from caden.methods._dino import dino as dino
from caden.methods._dpsgd import dpsgd as dpsgd
from caden.methods._dpsgd import local as local
from caden.methods._druid import dlm as dlm
from caden.methods._druid import druid as druid
from caden.methods._esom import esom as esom
from caden.methods._esom import network_newton as network_newton
from caden.methods._exact_diffusion import d2 as d2
from caden.methods._exact_diffusion import exact_diffusion as exact_diffusion
from caden.methods._exact_diffusion import nids as nids
from caden.methods._exact_diffusion import prox_diffusion as prox_diffusion
from caden.methods._extra import extra as extra
from caden.methods._fedadmm import fedadmm as fedadmm
from caden.methods._fedavg import fedavg as fedavg
from caden.methods._gasloc import gasloc as gasloc
from caden.methods._gt import diging as diging
from caden.methods._gt import gt as gt
from caden.methods._gt_adam import gt_adam as gt_adam
from caden.methods._gt_lbfgs import gt_lbfgs as gt_lbfgs
from caden.methods._kgt import kgt as kgt
from caden.methods._led import led as led
from caden.methods._lodadac import lodadac as lodadac
from caden.methods._lt_admm import lt_admm as lt_admm
from caden.methods._lt_admm import lt_admm_vr as lt_admm_vr
from caden.methods._newton_tracking import newton_tracking as newton_tracking
from caden.methods._normalised_tracking import demuon as demuon
from caden.methods._normalised_tracking import gt_nsgdm as gt_nsgdm
from caden.methods._proxskip import proxskip as proxskip
from caden.methods._qg_dsgdm import qg_dsgdm as qg_dsgdm
from caden.methods._radmm import radmm as radmm
from caden.methods._registry import CARDS as CARDS
from caden.methods._registry import CONDITIONS as CONDITIONS
from caden.methods._registry import METHODS as METHODS
from caden.methods._registry import Card as Card
from caden.methods._registry import advice_for as advice_for
from caden.methods._registry import register as register
from caden.methods._relay_sgd import relay_sgd as relay_sgd
from caden.methods._scaffold import scaffold as scaffold
from caden.methods._tutunov import tutunov as tutunov
