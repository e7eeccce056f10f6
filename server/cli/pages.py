"""The command `pages`: asks a running server for its page ledger and prints it."""

import argparse
import json
import os
import urllib.error
import urllib.request
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxserve.errors import JaxserveError

TIMEOUT_S = 10.0
KEY_VARIABLE = "JAXSERVE_ADMIN_KEY"


def add_pages_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server; default: this machine's")
    parser.add_argument("--admin-key", help=f"one of the server's admin keys; default: ${KEY_VARIABLE}")


def run_pages(parsed: argparse.Namespace) -> int:
    """Prints the ledger of a running server. Raises JaxserveError if it cannot be asked."""
    if not parsed.url.startswith(("http://", "https://")):
        raise JaxserveError(f"--url is {parsed.url!r}; it must begin with http:// or https://")
    url = f"{parsed.url.rstrip('/')}/admin/pages"
    key = parsed.admin_key or os.environ.get(KEY_VARIABLE)
    if not key:
        raise JaxserveError(f"an admin key is needed: --admin-key or ${KEY_VARIABLE}")
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
            ledger = json.load(reply)["ledger"]
    except urllib.error.HTTPError as error:
        raise JaxserveError(
            f"{url} answered {error.code}: {error.read(500).decode(errors='replace').strip()}"
        ) from None
    except (OSError, ValueError, KeyError) as error:
        raise JaxserveError(f"cannot read {url}: {error}") from None
    print_ledger(Console(), ledger)
    return 0


def print_ledger(console: Console, ledger: dict[str, Any]) -> None:
    console.print(
        f"{ledger['total']} pages of {ledger['page_size']} tokens, {ledger['page_bytes']:,} bytes each: "
        f"{ledger['active']} active ({ledger['shared']} of them shared), "
        f"{ledger['cached']} cached, {ledger['free']} free"
    )
    console.print(
        f"{ledger['slots']} slots in active pages, {ledger['unused_slots']} hold no token: {ledger['waste']:.1%} waste"
    )
    if ledger["host_total"]:
        console.print(f"{ledger['host_held']} of {ledger['host_total']} pages in host memory are taken")
    if not ledger["requests"]:
        return
    table = Table("request", "tokens", "pages", "shared", "cached", box=None)
    for request in ledger["requests"]:
        counts = [str(request[name]) for name in ("tokens", "pages", "shared_pages", "cached_pages")]
        table.add_row(request["request_id"], *counts)
    console.print(table)
