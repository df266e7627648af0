"""Reports: one page that works offline, and every figure and table as files."""

from caden.report.model import Report as Report
from caden.report.model import Section as Section
from caden.report.model import Table as Table
from caden.report.model import running_mean as running_mean
from caden.report.page import html as html
from caden.report.page import write as write
from caden.report.runs import graph_of as graph_of
from caden.report.runs import labelled as labelled
from caden.report.runs import load as load
from caden.report.runs import of_runs as of_runs
from caden.report.runs import parameters as parameters
from caden.report.runs import provenance as provenance
from caden.report.runs import results as results
from caden.report.runs import setting as setting
from caden.report.tables import markdown as markdown
from caden.report.tables import write_table as write_table
