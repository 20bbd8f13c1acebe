"""`ktc inspect`: what is in a bundle, how large, and what it runs on here. Prints ktc.bundle.describe's data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from ktc.progress import format_bytes


@click.command("inspect")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--trust-kernel",
    "trust_sha256",
    multiple=True,
    metavar="SHA256",
    help="Vouch for the bundle's library of this hash.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--graph", is_flag=True, help="Print the decode graph instead.")
@click.option("--verbose", "-v", is_flag=True, help="List files and kernel flags too.")
def command(bundle: Path, trust_sha256: tuple[str, ...], as_json: bool, graph: bool, verbose: bool) -> None:
    """Show what is in BUNDLE and what every layer runs on on this machine."""
    from ktc.bundle.describe import describe
    from ktc.bundle.reader import open_bundle

    opened = open_bundle(bundle)
    if graph:
        from ktc.native.inspect import graph_text

        click.echo(graph_text(opened, as_json), nl=False)
        return
    facts = describe(opened, trust_sha256)
    if as_json:
        click.echo(json.dumps(facts, indent=1))
        return
    for line in _lines(facts):
        click.echo(line)
    if verbose:
        click.echo("files")
        for name, entry in sorted(opened.files.items()):
            click.echo(f"  {format_bytes(entry['size']):>10}  {entry['sha256'][:12]}  {name}")
        for kernel in opened.manifest["kernels"]:
            click.echo(f"flags of {kernel['variant']}: {' '.join(kernel['flags'])}")


def _lines(facts: dict[str, Any]) -> list[str]:
    model, source, recipe = facts["model"], facts["source"], facts["recipe"]
    origin = source["repo"] or source["name"]
    if source["revision"]:
        origin += f" @ {source['revision'][:12]}"
    out = [
        f"{facts['bundle']}",
        f"  model     {model['architecture']} from {origin}, licence {source['licence'] or 'not stated'}",
        f"  experts   {model['moe_layers']} of {model['layers']} layers x {model['experts']} experts,"
        f" top {model['top_k']}, {model['dims']['hidden']} -> {model['dims']['intermediate']}",
        f"  stored    {', '.join(facts['schemes'])}; recipe {recipe['name'] or recipe['sha256'][:12]}",
        f"  format    {facts['format']}, made by {facts['created_by']}; {facts['files']} files",
        f"  nodes     {facts['nodes']}",
        f"  goldens   {facts['goldens']}",
        "sizes",
    ]
    total = sum(facts["sizes"].values())
    out += [f"  {format_bytes(size):>10}  {name}" for name, size in {**facts["sizes"], "total": total}.items()]
    out.append("layers")
    out += _table(facts["layers"])
    out.append("kernels in the bundle")
    width = max((len(kernel["variant"]) for kernel in facts["kernels"]), default=0)
    for kernel in facts["kernels"]:
        here = "runs here" if kernel["runs_here"] else "not for this CPU"
        out.append(
            f"  {kernel['variant']:<{width}}  {here:<17} {kernel['sha256'][:12]}  {kernel['compiler'].split(' / ')[0]}"
        )
    if not facts["kernels"]:
        out.append("  none: they are built where it runs")
    if facts["scratch"]:
        parts = ", ".join(f"{format_bytes(size)} {what}" for what, size in facts["scratch"].items())
        out.append(f"scratch of a MoE layer: {parts}")
    out.append(f"verdict: {facts['verdict']['level']}")
    for part in facts["verdict"]["parts"]:
        out.append(f"  {part['name']:<9} {part['level']:<13} {part['reason']}")
        if part["fix"]:
            out.append(f"  {'':<9} {'':<13} -> {part['fix']}")
    return out


def _table(rows: list[dict[str, Any]]) -> list[str]:
    cells = [(row["modules"], format_bytes(row["bytes"]), row["device"], row["runs_on"]) for row in rows]
    widths = [max(len(cell[i]) for cell in cells) for i in range(3)]
    return [
        f"  {where:<{widths[0]}}  {size:>{widths[1]}}  {device:<{widths[2]}}  {what}"
        for where, size, device, what in cells
    ]
