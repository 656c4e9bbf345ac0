"""What pytest leaves out: modules that need a package which is not installed, and one that replaces itself."""

import importlib.util

collect_ignore = ["jaxacct/sweep.py"]  # it puts a function in its own place
if not importlib.util.find_spec("opacus"):
    collect_ignore.append("jaxacct/interop/opacus_accountant.py")
if not importlib.util.find_spec("streamlit"):
    collect_ignore.append("jaxacct/cli/explore_page.py")
