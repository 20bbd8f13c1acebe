"""`ktc verify`: hashes, then goldens, of a bundle. Exit code 6 on any mismatch; see ktc/bundle/verify.py."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ktc.cli.engine_options import VARIANTS
from ktc.errors import BundleError
from ktc.progress import format_bytes, set_verbosity


@click.command("verify")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--hashes-only", is_flag=True, help="Do not run the goldens.")
@click.option("--variant", type=click.Choice(VARIANTS), help="Kernel variant for the goldens; default: the best here.")
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
) -> int:
    """Check every byte of BUNDLE against its manifest, then its recorded outputs on this machine."""
    set_verbosity(verbose)
    from ktc.bundle.reader import open_bundle
    from ktc.bundle.verify import verify

    opened = open_bundle(bundle)
    library = str(kernel_library) if kernel_library else None
    report = verify(opened, goldens=not hashes_only, variant=variant, trust_sha256=trust_sha256, library=library)
    if as_json:
        fields = {
            "ok": report.ok,
            "files": report.files,
            "bytes": report.nbytes,
            "faults": report.faults,
            "variant": report.variant,
            "goldens": [{**vars(case), "ok": case.ok} for case in report.cases],
        }
        click.echo(json.dumps(fields, indent=1))
        return 0 if report.ok else BundleError.exit_code
    for fault in report.faults:
        click.echo(f"BAD   {fault}")
    if not report.faults:
        click.echo(f"ok    {report.files} files, {format_bytes(report.nbytes)}: every hash matches")
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
    if not report.ok:
        bad = len(report.faults) or len(report.cases) - good
        raise BundleError(f"{bundle}: {bad} mismatch{'es' * (bad > 1)}", "do not use it: copy or compile it again")
    return 0
