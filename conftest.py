"""What pytest leaves out: modules that need a package which is not installed."""

import importlib.util

collect_ignore = [] if importlib.util.find_spec("opacus") else ["jaxacct/interop/opacus_accountant.py"]
