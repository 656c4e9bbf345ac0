"""`python -m jaxacct` is the `jaxacct` command."""

import sys

from jaxacct.cli import command

sys.exit(command())
