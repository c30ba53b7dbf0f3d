"""Checks this machine, without importing torch into this process: a broken torch or driver could crash the process."""

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
from typing import Any

from stretto.base.extras import is_installed
from stretto.base.units import format_bytes
from stretto.config.run import RunConfig
from stretto.launch.finding import Finding, ok, problem, warning
from stretto.launch.probe import ProbeFailedError, probe_torch
from stretto.mesh.launch_info import find_launch_info
from stretto.mesh.timeouts import OperationTimeoutError, call_with_timeout

_MIN_PYTHON = (3, 11)
_MIN_TORCH = (2, 10)
_EXTRAS = ("pyarrow", "datasets", "tokenizers", "aiobotocore", "s3fs", "gcsfs", "adlfs", "aiohttp", "tensorboard",
           "wandb", "mlflow", "prometheus_client", "opentelemetry.exporter.otlp.proto.http", "opentelemetry.sdk",
           "onnx", "onnxruntime", "onnxscript", "h5py", "cloudpickle", "shtab", "torchmetrics",
           "distributed", "ray")  # fmt: skip
_GIB = 1 << 30


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that must be the same on all machines; imports no package."""
    by_name = {"python": platform.python_version()}
    for name in ("torch", "numpy", "stretto"):
        try:
            by_name[name] = version(name)
        except PackageNotFoundError:
            by_name[name] = "absent"
    return by_name


def check_python() -> list[Finding]:
    """Check the version of Python, and whether stretto and numpy are installed."""
    detail = f"{platform.python_version()} at {sys.executable}"
    by_name = versions()
    packages = ", ".join(f"{name} {by_name[name]}" for name in ("stretto", "numpy"))
    return [
        ok("python", detail)
        if sys.version_info >= _MIN_PYTHON
        else problem("python", detail, f"install Python {'.'.join(map(str, _MIN_PYTHON))} or newer"),
        ok("packages", packages) if "absent" not in packages else problem("packages", packages, "pip install stretto"),
    ]


def check_torch(seconds: float) -> list[Finding]:
    """Check torch's version, backends and devices in a new process, which has `seconds` to finish."""
    try:
        probe = probe_torch(seconds)
    except ProbeFailedError as error:
        return [problem("torch", str(error), "reinstall torch; `python -c 'import torch'` must work")]
    build = f"CUDA {probe['cuda']}" if probe["cuda"] else f"ROCm {probe['hip']}" if probe["hip"] else "CPU only"
    detail = f"{probe['version']}, {build}, {', '.join(probe['backends']) or 'no backends'}"
    major_minor = tuple(int(part) for part in probe["version"].split("+")[0].split(".")[:2] if part.isdecimal())
    if major_minor < _MIN_TORCH:
        remedy = f"install torch {'.'.join(map(str, _MIN_TORCH))} or newer: older versions load weights unsafely"
        finding = problem("torch", detail, remedy)
    elif "gloo" not in probe["backends"]:
        finding = problem("torch", detail, "install a build of torch with gloo: it is needed for more than one rank")
    else:
        finding = ok("torch", detail)
    return [finding, *_check_devices(probe)]


def _check_devices(probe: Mapping[str, Any]) -> list[Finding]:
    gpu_tool = "rocm-smi" if probe["hip"] else "nvidia-smi"
    if not probe["devices"]:
        has_gpu = any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()
        if probe["error"] and has_gpu:
            remedy = f"fix the driver; `{gpu_tool}` must list the devices"
            return [problem("devices", f"none: {probe['error']}", remedy)]
        if has_gpu:
            return [problem("devices", "there is a GPU, but torch is CPU-only", "install torch with CUDA or ROCm")]
        return [ok("devices", "no accelerator: ranks use the CPU")]
    driver = "" if probe["driver"] is None else f", driver supports CUDA {probe['driver']}"
    findings = []
    for number, device in enumerate(probe["devices"]):
        name = f"device {number}"
        if device["error"]:
            remedy = "fix the device, or hide it with CUDA_VISIBLE_DEVICES"
            findings.append(problem(name, f"{device['name']}: {device['error']}", remedy))
            continue
        memory = f", {format_bytes(device['free'])} of {format_bytes(device['total'])} free" if device["total"] else ""
        detail = f"{device['name']}{memory}{driver}"
        if device["total"] and device["free"] < 0.5 * device["total"]:
            findings.append(warning(name, detail, f"end other processes that use its memory; `{gpu_tool}` lists them"))
        else:
            findings.append(ok(name, detail))
    return findings


def check_cores() -> list[Finding]:
    """Check how many cores this process can use, how busy they are, and whether OMP_NUM_THREADS fits them."""
    num_cores, num_allowed = os.cpu_count() or 1, len(os.sched_getaffinity(0))
    limit = _cpu_limit()
    threads = os.environ.get("OMP_NUM_THREADS", "")
    load = os.getloadavg()[0]
    detail = f"{num_allowed} of {num_cores} cores" if num_allowed < num_cores else f"{num_cores} cores"
    detail += "" if limit is None else f", limited to {limit:.1f} by a cgroup"
    detail += f", OMP_NUM_THREADS {threads or 'not set'}, load {load:.1f}"
    num_usable = num_allowed if limit is None else min(num_allowed, limit)
    max_threads = max(1, int(num_usable))
    if threads.isdecimal() and int(threads) > num_usable:
        remedy = f"set OMP_NUM_THREADS to {max_threads} or less: more threads compete for the same cores"
        return [warning("cores", detail, remedy)]
    if not threads and num_usable < num_cores:
        return [warning("cores", detail, f"set OMP_NUM_THREADS to {max_threads}: torch may start a thread per core")]
    if load > 1.5 * num_usable:
        remedy = (
            "wait, or end other processes" if threads == "1" else "wait, end other processes, or set OMP_NUM_THREADS=1"
        )
        return [warning("cores", detail, f"{remedy}: one slow thread or rank delays all")]
    return [ok("cores", detail)]


def _cpu_limit() -> float | None:
    """Return the number of cores that the cgroup allows; None without a limit."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def check_memory() -> list[Finding]:
    """Check free memory and swap."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    meminfo = {line.split(":")[0]: 1024 * int(line.split()[1]) for line in lines}  # KiB to bytes
    total, free = meminfo["MemTotal"], meminfo["MemAvailable"]
    limit, used = container_memory() or (total, 0)
    if limit < total:
        total, free = limit, min(free, limit - used)
    swap_used = meminfo["SwapTotal"] - meminfo["SwapFree"]
    swap = f"{format_bytes(swap_used)} of {format_bytes(meminfo['SwapTotal'])} swap used"
    detail = f"{format_bytes(free)} of {format_bytes(total)} free, {swap}"
    if free < _GIB // 2:
        return [problem("memory", detail, "end other processes or raise the container's limit, or ranks may be killed")]
    if free < 2 * _GIB:
        return [warning("memory", detail, "free some memory: each rank needs about 0.3 GB before it has a model")]
    if swap_used > 0.1 * total:
        return [warning("memory", detail, "check which processes are swapped out: one rank that swaps delays all")]
    return [ok("memory", detail)]


def container_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> tuple[int, int] | None:
    """Return a container's memory limit and its memory in use, without reclaimable page cache; None without a limit."""
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
    except OSError:
        return None
    try:
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except OSError:
        stat = {}
    return None if limit == "max" else (int(limit), max(0, used - int(stat.get("inactive_file", 0))))


def check_shared_memory(config: RunConfig | None) -> list[Finding]:
    """Check /dev/shm, through which data workers pass the windows they read to their rank."""
    name = "shared memory"
    if not Path("/dev/shm").is_dir():
        return [warning(name, "/dev/shm does not exist", "use data.workers = 0")]
    usage = shutil.disk_usage("/dev/shm")
    detail = f"{format_bytes(usage.free)} of {format_bytes(usage.total)} free in /dev/shm"
    if usage.free < _GIB // 4:
        remedy = "make it larger (docker: --shm-size 1g), or use data.workers = 0"
        has_workers = config is not None and config.data.workers > 0
        return [problem(name, detail, remedy) if has_workers else warning(name, detail, remedy)]
    return [ok(name, detail)]


def check_open_files() -> list[Finding]:
    """Check how many files and connections a process may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return [ok("open files", "no limit")]
    detail = f"{soft:,} per process" + ("" if hard == resource.RLIM_INFINITY else f", can be raised to {hard:,}")
    if soft < 256:
        return [problem("open files", detail, "raise the limit: `ulimit -n 4096`")]
    if soft < 1024:
        return [warning("open files", detail, "raise the limit for many ranks or workers: `ulimit -n 4096`")]
    return [ok("open files", detail)]


def check_loopback() -> list[Finding]:
    """Send a few bytes over loopback, as ranks of one machine do."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(3)
        with socket.create_connection(server.getsockname(), timeout=3) as client:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"stretto")
                if client.recv(7) != b"stretto":
                    return [problem("loopback", "127.0.0.1 returned different bytes", "check for a firewall or proxy")]
        port = server.getsockname()[1]
    if "lo" not in {name for _, name in socket.if_nameindex()}:
        return [warning("loopback", "no interface is named lo", "set GLOO_SOCKET_IFNAME to the one that has 127.0.0.1")]
    return [ok("loopback", f"127.0.0.1 answers, port {port} was free")]


def check_host_name() -> list[Finding]:
    """Resolve this host's name, as ranks of several machines do."""
    name = socket.gethostname()
    started = time.perf_counter()
    remedy = f"add `{name}` to /etc/hosts; only runs on several machines need it"
    try:
        answers = call_with_timeout(5.0, lambda: socket.getaddrinfo(name, None))
    except OperationTimeoutError:
        return [warning("host name", f"{name} takes more than 5 s to resolve", remedy)]
    except OSError as error:
        return [warning("host name", f"{name} can't be resolved ({error.strerror or error})", remedy)]
    seconds = time.perf_counter() - started
    addresses = sorted({str(socket_address[0]) for *_, socket_address in answers})
    detail = f"{name} is {', '.join(addresses[:3])}"
    if seconds > 1:
        return [warning("host name", f"{detail}, resolved in {seconds:.1f} s", remedy)]
    return [ok("host name", detail)]


def check_environment() -> list[Finding]:
    """Look for environment variables that change how a run behaves. Users often don't know that they are set."""
    findings = [
        warning(f"${name}", _shorten(os.environ[name]), remedy)
        for name, remedy in _RISKY_VARIABLES
        if os.environ.get(name)
    ]
    findings += [
        warning(f"${name}", _shorten(value), "unset it unless you need it: it changes what NCCL does")
        for name, value in sorted(os.environ.items())
        if name.startswith("NCCL_") and not name.startswith("NCCL_DEBUG")
    ]
    if os.environ.get("MASTER_ADDR") and find_launch_info(os.environ) is None:
        remedy = "unset it: no launcher has started ranks here"
        findings.append(warning("$MASTER_ADDR", _shorten(os.environ["MASTER_ADDR"]), remedy))
    proxies = [name for name in _PROXY_VARIABLES if os.environ.get(name)]
    no_proxy = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    if proxies and not ("127.0.0.1" in no_proxy or "localhost" in no_proxy or no_proxy == "*"):
        remedy = "set no_proxy=localhost,127.0.0.1, or requests to object storage on this machine go to the proxy"
        findings.append(warning(f"${proxies[0]}", "set, and applies to localhost too", remedy))
    return findings or [ok("environment", "no risky variable is set")]


_PROXY_VARIABLES = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
_RISKY_VARIABLES = (
    ("PYTHONOPTIMIZE", "unset it: it removes the assertions from Python code, torch's included"),
    ("TORCH_DISTRIBUTED_DEBUG", "unset it for real runs: DETAIL checks every collective, which is slow"),
    ("CUDA_LAUNCH_BLOCKING", "unset it for real runs: the CPU waits for each kernel to finish; pipelines refuse it"),
    ("CUDA_VISIBLE_DEVICES", "unset it to use all devices: ranks see only these"),
    ("GLOO_SOCKET_IFNAME", "unset it unless all machines have this interface, the only one that gloo then uses"),
    ("NCCL_DEBUG", "unset it for real runs: it fills the output"),
)


def _shorten(value: str) -> str:
    return value if len(value) <= 40 else f"{value[:37]}..."


def check_extras() -> list[Finding]:
    """List the optional packages, installed or not; none is required."""
    installed = [name for name in _EXTRAS if is_installed(name)]
    lists = {"installed": installed, "not installed": [name for name in _EXTRAS if name not in installed]}
    return [ok("extras", "; ".join(f"{title}: {', '.join(names)}" for title, names in lists.items() if names))]
