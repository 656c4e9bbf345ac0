"""`jaxacct explore`: serve the page of `explore_page.py` to this machine alone, and open it in a browser.

Streamlit runs this file again after every change on the page. The page's code is imported only once, as a module.
"""

from __future__ import annotations

import argparse
import contextlib
import socket

ADDRESS = "127.0.0.1"
"""The loopback address: no other machine can reach the page."""
PORTS = range(8501, 8601)
"""Ports that are tried in turn if the user names none. The first one is streamlit's default."""


def run(options: argparse.Namespace) -> int:
    """Run `jaxacct explore` until Ctrl-C and return its exit status."""
    from jaxacct.cli import output
    from jaxacct.core.files import optional_package

    optional_package("matplotlib", "the page")
    bootstrap = optional_package("streamlit.web.bootstrap", "the page")
    from jaxacct.cli import explore_page

    port = free_port(options.port)
    explore_page.first_answer()  # imports and prepares what the first visitor would otherwise wait for
    settings = {
        "server_address": ADDRESS,
        "server_port": port,
        "server_headless": bool(options.no_browser),
        "server_fileWatcherType": "none",
        "browser_gatherUsageStats": False,
        "client_toolbarMode": "viewer",
        "client_showErrorDetails": "none",
        "runner_magicEnabled": False,
        "logger_hideWelcomeMessage": True,
    }
    bootstrap.load_config_options(settings)
    url = f"http://{ADDRESS}:{port}"
    output.report({"url": url}, lambda _: f"page    {url}\nend     Ctrl-C", options)
    bootstrap.run(__file__, False, [], settings)
    return 0


def free_port(wanted: int | None) -> int:
    """Return the port `wanted`; if `wanted` is None, return the first free port of PORTS. Refuse a taken port."""
    from jaxacct.core.validation import InputError

    if wanted is not None and not 1 <= wanted <= 65535:
        raise InputError(f"port = {wanted} must be from 1 to 65535; use one such as {PORTS[0]}")
    for port in PORTS if wanted is None else [wanted]:
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind((ADDRESS, port))
            return port
    raise InputError(f"port = {wanted or PORTS[-1]} cannot be opened; use another, such as --port {PORTS[-1] + 1}")


if __name__ == "__main__":
    from jaxacct.cli import explore_page

    explore_page.page()
