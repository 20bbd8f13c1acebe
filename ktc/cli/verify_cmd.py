"""`ktc verify`: hashes, then goldens, of a bundle. Exit code 6 on any mismatch; see ktc/bundle/verify.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ktc.codegen.variants import VARIANTS
from ktc.errors import BundleError, KtcError
from ktc.progress import format_bytes, set_verbosity

if TYPE_CHECKING:
    from ktc.bundle.verify import Report


@click.command("verify")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--hashes-only", is_flag=True, help="Do not run the goldens.")
@click.option(
    "--variant", type=click.Choice(list(VARIANTS)), help="Kernel variant for the goldens; default: the best here."
)
@click.option(
    "--kernel-library",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Run the goldens with this kernel library instead of the bundle's.",
)
@click.option(
    "--trust-kernel", "trust_sha256", multiple=True, metavar="SHA256", help="Load the bundle's library with this hash."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--verbose", "-v", count=True, help="One line per golden.")
def command(
    bundle: Path,
    hashes_only: bool,
    variant: str | None,
    kernel_library: Path | None,
    trust_sha256: tuple[str, ...],
    as_json: bool,
    verbose: int,
) -> None:
    """Check every byte of BUNDLE against its manifest, then its recorded outputs on this machine."""
    set_verbosity(verbose)
    from ktc.bundle.verify import Report, verify

    library = str(kernel_library) if kernel_library else None
    report = Report()
    try:
        verify(
            bundle,
            goldens=not hashes_only,
            variant=variant,
            trust_sha256=trust_sha256,
            library=library,
            report=report,
        )
    except KtcError as error:  # no bundle, or goldens that cannot be run here
        if as_json:
            report.faults.append(error.message)
            _print_json(report)
        elif report.files:
            _print_files(report)
        raise
    if as_json:
        _print_json(report)
    else:
        _print(report, hashes_only, verbose)
    if not report.ok:
        bad = len(report.faults) or sum(not case.ok for case in report.cases)
        raise BundleError(f"{bundle}: {bad} mismatch{'es' * (bad > 1)}", "do not use it: copy or compile it again")


def _print_json(report: Report) -> None:
    fields = {
        "ok": report.ok,
        "files": report.files,
        "bytes": report.nbytes,
        "faults": report.faults,
        "variant": report.variant,
        "goldens": [{**vars(case), "ok": case.ok} for case in report.cases],
    }
    click.echo(json.dumps(fields, indent=1))


def _print_files(report: Report) -> None:
    for fault in report.faults:
        click.echo(f"BAD   {fault}")
    if not report.faults:
        click.echo(f"ok    {report.files} files, {format_bytes(report.nbytes)}: every hash matches")


def _print(report: Report, hashes_only: bool, verbose: int) -> None:
    _print_files(report)
    for case in report.cases:
        if verbose or not case.ok:
            state = "ok   " if case.ok else "BAD  "
            click.echo(f"{state} {case.name}: relative error {case.error:.2e}, allowed {case.tolerance:.0e}")
    good = sum(case.ok for case in report.cases)
    if report.cases:
        worst = max(case.error for case in report.cases)
        state = "ok   " if good == len(report.cases) else "BAD  "
        click.echo(
            f"{state} {good} of {len(report.cases)} goldens match on {report.variant}"
            f" (worst relative error {worst:.2e})"
        )
    elif not report.faults:
        click.echo("note  goldens were not run" if hashes_only else "note  this bundle has no goldens")
