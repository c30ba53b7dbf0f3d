"""Machine: what of this machine a run depends on, looked at without torch."""

import importlib.util
import os
import platform
import resource
import shutil
import socket
import sys
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from stretto.config.run import RunConfig
from stretto.launch.finding import Finding, ok, problem, warning
from stretto.launch.probe import ProbeFailedError, probe_torch
from stretto.mesh.launch_info import find_launch_info
from stretto.mesh.timeouts import OperationTimeoutError, call_with_timeout
from stretto.plan.units import format_bytes

_OLDEST_PYTHON = (3, 11)
_OLDEST_TORCH = (2, 10)
_EXTRAS = (
    "pyarrow",
    "datasets",
    "s3fs",
    "tensorboard",
    "wandb",
    "mlflow",
    "prometheus_client",
    "onnx",
    "onnxruntime",
)
_GB = 1 << 30


def versions() -> dict[str, str]:
    """Return the versions that must be equal on all nodes; nothing is imported for it."""
    found = {"python": platform.python_version()}
    for name in ("torch", "numpy", "stretto"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return found


def check_python() -> list[Finding]:
    """Look at Python, and at what belongs to it."""
    found = f"{platform.python_version()} at {sys.executable}"
    oldest = ".".join(map(str, _OLDEST_PYTHON))
    told = versions()
    packages = ", ".join(f"{name} {told[name]}" for name in ("stretto", "numpy"))
    return [
        ok("python", found)
        if sys.version_info >= _OLDEST_PYTHON
        else problem("python", found, f"install Python {oldest} or newer"),
        ok("packages", packages) if "absent" not in packages else problem("packages", packages, "pip install stretto"),
    ]


def check_torch(seconds: float) -> list[Finding]:
    """Ask torch for its version, its build and its devices."""
    try:
        told = probe_torch(seconds)
    except ProbeFailedError as error:
        return [problem("torch", str(error), "install torch again; `python -c 'import torch'` must work")]
    build = f"CUDA {told['cuda']}" if told["cuda"] else f"ROCm {told['hip']}" if told["hip"] else "CPU only"
    found = f"{told['version']}, {build}, {', '.join(told['backends']) or 'no backends'}"
    numbers = tuple(int(part) for part in told["version"].split("+")[0].split(".")[:2] if part.isdecimal())
    oldest = ".".join(map(str, _OLDEST_TORCH))
    if numbers < _OLDEST_TORCH:
        findings = [problem("torch", found, f"install torch {oldest} or newer: loading weights is not safe before it")]
    elif "gloo" not in told["backends"]:
        findings = [problem("torch", found, "install a torch with gloo: without it there is one rank only")]
    else:
        findings = [ok("torch", found)]
    return [*findings, *_devices(told)]


def _devices(told: Mapping[str, object]) -> list[Finding]:
    devices = told["devices"]
    assert isinstance(devices, list)
    if not devices:
        is_there = any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()
        if told["error"] and is_there:
            return [problem("devices", f"none: {told['error']}", "mend the driver; `nvidia-smi` must show the devices")]
        if is_there:
            return [problem("devices", "a GPU is here, but this torch has no CUDA", "install a torch built with CUDA")]
        return [ok("devices", "no accelerator: ranks compute on cores")]
    driver = "" if told["driver"] is None else f", driver {told['driver']}"
    findings = []
    for number, device in enumerate(devices):
        what = f"device {number}"
        if device["error"]:
            findings.append(problem(what, f"{device['name']}: {device['error']}", "mend it, or hide it with "
                            "CUDA_VISIBLE_DEVICES"))  # fmt: skip
            continue
        memory = f", {format_bytes(device['free'])} of {format_bytes(device['total'])} free" if device["total"] else ""
        found = f"{device['name']}{memory}{driver}"
        is_used = device["total"] and device["free"] < 0.5 * device["total"]
        findings.append(
            warning(what, found, "end what else uses its memory; `nvidia-smi` names it") if is_used else ok(what, found)
        )
    return findings


def check_cores() -> list[Finding]:
    """Look at how many cores there are for us, and how many threads would use them."""
    there, ours = os.cpu_count() or 1, len(os.sched_getaffinity(0))
    limit = _cpu_limit()
    threads = os.environ.get("OMP_NUM_THREADS", "")
    load = os.getloadavg()[0]
    found = f"{ours} of {there} cores" if ours < there else f"{there} cores"
    found += "" if limit is None else f", limited to {limit:.1f}"
    found += f", OMP_NUM_THREADS {threads or 'not set'}, load {load:.1f}"
    usable = ours if limit is None else min(ours, limit)
    if threads.isdecimal() and int(threads) > usable:
        return [
            warning("cores", found, f"set OMP_NUM_THREADS to {max(1, int(usable))} or less: more threads only wait")
        ]
    if not threads and usable < there:
        return [warning("cores", found, f"set OMP_NUM_THREADS to {max(1, int(usable))}: torch may count all cores")]
    if load > 1.5 * usable:
        return [warning("cores", found, "wait, or end what else is running: a rank that is held up holds up all")]
    return [ok("cores", found)]


def _cpu_limit() -> float | None:
    """Cores that a container may use, as its cgroup has it."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def check_memory() -> list[Finding]:
    """Look at memory, and at how much of it is on a disk."""
    told = {line.split(":")[0]: 1024 * int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines()}
    total, free = told["MemTotal"], told["MemAvailable"]
    limit = memory_limit()
    if limit is not None and limit[0] < total:
        total, free = limit[0], min(free, limit[0] - limit[1])
    swapped = told["SwapTotal"] - told["SwapFree"]
    found = f"{format_bytes(free)} of {format_bytes(total)} free, {format_bytes(swapped)} of {format_bytes(told['SwapTotal'])} swap used"
    if free < _GB // 2:
        return [problem("memory", found, "end something, or give the container more: ranks would be killed")]
    if free < 2 * _GB:
        return [warning("memory", found, "leave more of it free: each rank takes about 0.3 GB before it has a model")]
    if swapped > 0.1 * total:
        return [warning("memory", found, "see what was swapped out: a rank that waits for a disk holds up all")]
    return [ok("memory", found)]


def memory_limit(group: Path = Path("/sys/fs/cgroup")) -> tuple[int, int] | None:
    """Return the bytes that a container may use, and that it uses: not those of files that it would forget first."""
    try:
        most = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
    except OSError:
        return None
    try:
        parts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        parts = {}
    return None if most == "max" else (int(most), max(0, used - int(parts.get("inactive_file", 0))))


def check_shared_memory(config: RunConfig | None) -> list[Finding]:
    """Look at /dev/shm, through which workers that read ahead hand over what they have read."""
    what = "shared memory"
    if not Path("/dev/shm").is_dir():
        return [warning(what, "/dev/shm is not there", "leave data.workers at 0")]
    usage = shutil.disk_usage("/dev/shm")
    found = f"{format_bytes(usage.free)} of {format_bytes(usage.total)} free in /dev/shm"
    if usage.free < _GB // 4:
        remedy = "give more (docker: --shm-size 1g), or leave data.workers at 0"
        is_used = config is not None and config.data.workers > 0
        return [problem(what, found, remedy) if is_used else warning(what, found, remedy)]
    return [ok(what, found)]


def check_open_files() -> list[Finding]:
    """Look at how many files and connections a process may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft:,} a process, up to {hard:,}"
    if soft < 256:
        return [problem("open files", found, "raise the limit: `ulimit -n 4096`")]
    if soft < 1024:
        return [warning("open files", found, "raise the limit for many ranks or workers: `ulimit -n 4096`")]
    return [ok("open files", found)]


def check_loopback() -> list[Finding]:
    """Send a few bytes to ourselves, as ranks of one machine do."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(3)
        with socket.create_connection(server.getsockname(), timeout=3) as there:
            here, _ = server.accept()
            with here:
                here.sendall(b"stretto")
                if there.recv(7) != b"stretto":
                    return [problem("loopback", "127.0.0.1 gave back something else", "see what filters it")]
        port = server.getsockname()[1]
    if "lo" not in {name for _, name in socket.if_nameindex()}:
        return [warning("loopback", "there is no interface lo", "name the one of 127.0.0.1 in GLOO_SOCKET_IFNAME")]
    return [ok("loopback", f"127.0.0.1 answers, port {port} was free")]


def check_host_name() -> list[Finding]:
    """Look up this host's own name, as ranks of several machines do."""
    name = socket.gethostname()
    started = time.perf_counter()
    remedy = f"put `{name}` into /etc/hosts; only runs over several machines look it up"
    try:
        addresses = call_with_timeout(5.0, lambda: _resolve(name))
    except OperationTimeoutError:
        return [warning("host name", f"{name} takes more than 5 s to look up", remedy)]
    seconds = time.perf_counter() - started
    if isinstance(addresses, str):
        return [warning("host name", f"{name} can't be looked up ({addresses})", remedy)]
    found = f"{name} is {', '.join(addresses[:3])}"
    return [warning("host name", f"{found}, after {seconds:.1f} s", remedy) if seconds > 1 else ok("host name", found)]


def _resolve(name: str) -> list[str] | str:
    try:
        return sorted({str(answer[4][0]) for answer in socket.getaddrinfo(name, None)})
    except OSError as error:
        return error.strerror or str(error)


def check_environment() -> list[Finding]:
    """Look for variables that change what happens, often set long ago by someone else."""
    findings = [
        warning(f"${name}", _shorten(os.environ[name]), remedy)
        for name, remedy in _RISKY_VARIABLES
        if os.environ.get(name)
    ]
    findings += [
        warning(f"${name}", _shorten(value), "unset it unless you know why it is set: it changes how NCCL connects")
        for name, value in sorted(os.environ.items())
        if name.startswith("NCCL_") and name != "NCCL_DEBUG"
    ]
    if os.environ.get("MASTER_ADDR") and find_launch_info(os.environ) is None:
        remedy = "unset it: no launcher has started ranks here, so it is left over from something else"
        findings.append(warning("$MASTER_ADDR", _shorten(os.environ["MASTER_ADDR"]), remedy))
    proxies = [name for name in _PROXIES if os.environ.get(name)]
    spared = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    if proxies and not ("127.0.0.1" in spared or "localhost" in spared or spared == "*"):
        remedy = (
            "set no_proxy=localhost,127.0.0.1: object storage on this machine would be asked for by way of the proxy"
        )
        findings.append(warning(f"${proxies[0]}", "set, and localhost is not spared", remedy))
    return findings or [ok("environment", "no variable that commonly bites is set")]


_PROXIES = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
_RISKY_VARIABLES = (
    ("PYTHONOPTIMIZE", "unset it: it takes the checks out of Python's own and torch's code"),
    ("TORCH_DISTRIBUTED_DEBUG", "unset it for real runs: every collective is checked, and takes longer"),
    ("CUDA_LAUNCH_BLOCKING", "unset it for real runs: every kernel waits for the one before"),
    ("CUDA_VISIBLE_DEVICES", "only these devices are seen; unset it to see all"),
    ("GLOO_SOCKET_IFNAME", "ranks connect by this interface only; it must be there on every machine"),
    ("NCCL_DEBUG", "unset it when all works: it fills the output"),
)


def _shorten(value: str) -> str:
    return value if len(value) <= 40 else f"{value[:37]}..."


def check_extras() -> list[Finding]:
    """Say which optional packages are here; none is needed."""
    there = [name for name in _EXTRAS if importlib.util.find_spec(name) is not None]
    absent = [name for name in _EXTRAS if name not in there]
    parts = [f"here: {', '.join(there)}"] * bool(there) + [f"not here: {', '.join(absent)}"] * bool(absent)
    return [ok("extras", "; ".join(parts))]
