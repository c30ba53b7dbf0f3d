"""The command `stretto doctor`.

Check what a run depends on: Python, torch, devices, cores, memory, shared memory, open files, disks, locks, loopback,
host name, environment variables, extras, and the link between ranks that this command launches. Under torchrun, srun,
mpirun or TF_CONFIG, use the job's ranks, and compare versions and clocks too. With --gpu, train on this machine's GPUs
in several layouts instead, kill a rank, save and resume. Exit code 0: no problems. 1: problems.

example:
  stretto doctor --run run.toml
  stretto doctor --gpu
  torchrun --nnodes 2 --nproc-per-node 8 ... --no-python stretto doctor
"""

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from stretto.base.disk import explain_write_errors, write_atomic
from stretto.base.errors import ConfigError, StrettoError
from stretto.base.reason import short_reason
from stretto.base.units import pluralize
from stretto.cli.parser import Parser
from stretto.cli.views.console import make_console
from stretto.config.toml import load_config
from stretto.mesh.launch_info import LaunchInfo, find_launch_info

if TYPE_CHECKING:
    from rich.console import Console

    from stretto.config.run import RunConfig
    from stretto.launch.finding import Finding


_GPU_OUTPUT = "stretto-doctor.json"


class ProblemsFoundError(StrettoError):
    """The checks found a problem; the table says which."""

    exit_code = 1


def add_arguments(parser: Parser) -> None:
    parser.usage = (
        "stretto doctor [--ranks N] [--run RUN.toml] [--json FILE] [--device NAME]\n"
        "       stretto doctor --gpu [--backend nccl|strict|gloo] [--ranks N] [--output FILE]"
    )
    add = parser.add_argument
    ranks_help = "ranks to launch locally; 1 launches none (default: 2, or with --gpu one per GPU)"
    add("--ranks", type=int, metavar="N", help=ranks_help)
    add("--run", type=Path, metavar="RUN.toml", help="check the folders that this run writes to, not the default ones")
    add("--json", type=Path, metavar="FILE", help="also write the findings to this file")
    add("--device", default="auto", metavar="NAME", help="device that the ranks use (default: auto)")
    add("--gpu", action="store_true", help="check that ranks connect, train, fail and save on this machine's GPUs")
    backend_help = "with --gpu: nccl, or on CPUs strict (NCCL's rules) or gloo (default: nccl)"
    add("--backend", choices=("nccl", "strict", "gloo"), metavar="NAME", help=backend_help)
    output_help = f"with --gpu: file for the results, as JSON (default: {_GPU_OUTPUT})"
    add("--output", type=Path, metavar="FILE", help=output_help)
    add("--links", type=Path, help=argparse.SUPPRESS)  # internal, see `_measure_links`


def run(options: argparse.Namespace) -> None:
    """Run the checks, and print the findings."""
    if options.ranks is not None and options.ranks < 1:
        raise ConfigError(f"--ranks={options.ranks} must be at least 1; 1 launches no ranks")
    if options.gpu:
        _check_gpus(options)
        return
    for name in ("backend", "output"):
        if (value := getattr(options, name)) is not None:
            raise ConfigError(f"--{name}={value} is an option of --gpu; add --gpu, or leave it out")
    options.ranks = options.ranks or 2
    config = None if options.run is None else load_config(options.run)
    if options.links is not None:
        _measure_links(options)
        return
    console = make_console(is_wrapped=True)
    if (launch_info := find_launch_info(os.environ)) is not None:
        _check_on_ranks(console, options, config, launch_info)
        return
    from stretto.launch.doctor import diagnose

    with console.status("checking ...") as status:
        ranks, device = options.ranks, options.device
        findings = diagnose(
            config, ranks=ranks, device=device, on_check=lambda name: status.update(f"checking {name} ...")
        )
    _report_findings(console, findings, options.json)


def _check_gpus(options: argparse.Namespace) -> None:
    """Check the GPUs: print a line for each check, then a table; write the results as JSON."""
    for name in ("run", "json"):
        if (value := getattr(options, name)) is not None:
            raise ConfigError(f"--{name}={value} can't be combined with --gpu; leave it out, or use --output")
    if find_launch_info(os.environ) is not None:
        raise ConfigError("--gpu starts ranks itself; run it without torchrun, srun or mpirun, once per machine")
    from stretto.cli.views.gpu_report_view import GpuProgress, gpu_table, summarize
    from stretto.launch.gpu_checks.run_checks import diagnose_gpus

    console = make_console(is_wrapped=True)
    path = options.output or Path(_GPU_OUTPUT)
    if options.device != "auto":
        raise ConfigError(f"--device={options.device} can't be combined with --gpu; choose GPUs with --ranks")
    if path.is_dir() or not os.access(path.parent, os.W_OK):  # say so before minutes are spent
        raise ConfigError(f"--output={path} can't be written; choose a file in a folder that you can write to")
    progress = GpuProgress(console)
    report = diagnose_gpus(options.backend, ranks=options.ranks, on_check=progress.begin, on_result=progress.end)
    console.print(gpu_table(report))
    for check in report.checks:
        if check.result != "passed":
            console.print(f"{check.result}: {check.name}: {check.message}")
    console.print(f"{summarize(report)}; backend {report.backend}")
    with explain_write_errors(f"--output={path}"):
        write_atomic(path, report.to_json().encode())
    if report.backend != "nccl":
        rules = ", under NCCL's rules" if report.backend == "strict" else ""
        console.print(f"no GPU was tested: the ranks ran on CPUs{rules}")
    wants_issue = report.has_failures or report.backend == "nccl"
    console.print(f"{path} has all figures{'; paste it into an issue' if wants_issue else ''}", soft_wrap=True)
    if report.has_failures:
        raise ProblemsFoundError


def _check_on_ranks(
    console: "Console", options: argparse.Namespace, config: "RunConfig | None", launch_info: LaunchInfo
) -> None:
    """Check each machine on its first rank, and the links from rank 0; rank 0 prints the findings."""
    from stretto.launch.doctor import check_machine, rendezvous_timeout
    from stretto.launch.finding import problem
    from stretto.launch.link_checks import gather_findings, link_findings, measure_rank_zero_links
    from stretto.mesh.join import world

    findings = check_machine(config) if launch_info.local_rank == 0 else []
    try:
        with world(device=options.device, timeout=rendezvous_timeout(config)) as joined:
            prints_findings = joined.is_rank_zero
            findings = gather_findings(joined, launch_info.local_rank, findings)
            findings += link_findings(measure_rank_zero_links(joined, launch_info.local_size))
    except (StrettoError, RuntimeError) as error:
        # Without the other ranks, each machine prints its own findings.
        prints_findings = launch_info.local_rank == 0
        detail = f"joining the job or measuring its links failed: {short_reason(error)}"
        findings.append(problem("ranks", detail, "check that all ranks were launched and can reach each other"))
    if prints_findings:
        _report_findings(console, findings, options.json)


def _measure_links(options: argparse.Namespace) -> None:
    """Serve `check_links`: launch ranks that run this same command. They measure the links; rank 0 writes `--links`."""
    from stretto.launch.doctor import RENDEZVOUS_TIMEOUT
    from stretto.launch.link_checks import measure_rank_zero_links
    from stretto.launch.local import launch_local
    from stretto.launch.parent_exit import exit_when_launcher_dies
    from stretto.mesh.join import world

    if find_launch_info(os.environ) is None:
        launch_local(options.ranks, options.command_line)
        return
    exit_when_launcher_dies()
    with world(device=options.device, timeout=RENDEZVOUS_TIMEOUT) as joined:
        links = measure_rank_zero_links(joined, joined.local_size)
        if joined.is_rank_zero:
            write_atomic(options.links, json.dumps(links).encode())


def _report_findings(console: "Console", findings: "list[Finding]", path: Path | None) -> None:
    """Print the findings, and write them to `path` as JSON; raise ProblemsFoundError if there is a problem."""
    if path is not None:
        content = json.dumps([asdict(finding) for finding in findings], indent=1)
        with explain_write_errors(f"--json={path}"):
            write_atomic(path, content.encode())
    from rich.table import Table

    has_hosts = any(finding.host for finding in findings)
    table = Table("", "check", "finding", *(["host"] if has_hosts else []))
    styles = {"ok": None, "warning": "yellow", "problem": "bold red"}
    # With several machines, list passed checks for the first machine only, but warnings and problems for all.
    first_host = next((finding.host for finding in findings), "")
    for finding in findings:
        if finding.level == "ok" and finding.host not in ("", first_host):
            continue
        row = [finding.level, finding.name, finding.detail, *([finding.host] if has_hosts else [])]
        table.add_row(*row, style=styles[finding.level])
    console.print(table)
    for finding in findings:
        if finding.level != "ok":
            host = f" ({finding.host})" if finding.host else ""
            console.print(f"{finding.level}: {finding.name}{host}: {finding.remedy}")
    num_ok, num_warnings, num_problems = (sum(finding.level == level for finding in findings) for level in styles)
    console.print(f"{num_ok} ok, {pluralize(num_warnings, 'warning')}, {pluralize(num_problems, 'problem')}")
    if num_problems:
        raise ProblemsFoundError
