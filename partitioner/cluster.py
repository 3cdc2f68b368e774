"""The machine that a plan is made for: a few figures per device and per link, each with its source.

Clusters come from presets (`partitioner/clusters/*.toml`), from files of the same form, or from a calibration of the machine at hand.
A file is data from a stranger: TOML, at most 64 kB, every figure finite and within the bounds written below.
"""

import re
import tomllib
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from partitioner.errors import ClusterError
from partitioner.files import read_text
from partitioner.quantities import format_bytes, parse_bytes

OpClass = Literal["matmul", "attention", "convolution", "pointwise", "special"]
Dtype = Literal["float64", "float32", "bfloat16", "float16"]
Collective = Literal["all_gather", "reduce_scatter", "all_reduce"]

MAX_FILE_BYTES = 64 * 1024
MAX_DEVICES = 1_000_000
MAX_DOTS = 200

Rate = Annotated[float, Field(gt=0, le=1e19, allow_inf_nan=False)]
Duration = Annotated[float, Field(ge=0, le=10.0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(gt=0, le=1.0, allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1, max_length=500)]
_STRICT = ConfigDict(frozen=True, extra="forbid", strict=True)


class Efficiency(BaseModel):
    """The share of the peak that ops of one class reach: fraction * d / (d + half_dim), d the smallest dim of a contraction.

    For "pointwise" and "special" (exp, tanh, softmax …) it is the share of the memory bandwidth, and half_dim is not used.
    """

    model_config = _STRICT
    fraction: Fraction = 1.0
    half_dim: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 0.0

    def at(self, dim: float) -> float:
        return self.fraction * dim / (dim + self.half_dim) if dim > 0 else self.fraction


class Link(BaseModel):
    """What joins two devices. A ring collective costs base + steps * alpha + (its bytes per device) / bytes_per_second, in seconds.

    reduce_bytes_per_second: of collectives that also sum, where it is another figure.
    """

    model_config = _STRICT
    alpha_seconds: Duration
    bytes_per_second: Rate
    base_seconds: Duration = 0.0
    reduce_bytes_per_second: Rate | None = None

    def rate(self, kind: Collective) -> float:
        """Bytes per second that one device passes on in such a collective."""
        summing = None if kind == "all_gather" else self.reduce_bytes_per_second
        return summing or self.bytes_per_second


class Cluster(BaseModel):
    """`nodes` x `devices_per_node` equal devices. All figures are per device; rates are peaks, which `efficiency` scales.

    share: less than 1 where CPU ranks outnumber the cores of their machine: how much of a core each has while all compute, which is what the rates
    are for. While some wait, the others have more, up to a whole one.
    """

    model_config = _STRICT
    name: Text
    device: Literal["cpu", "cuda"]
    nodes: Annotated[int, Field(ge=1, le=MAX_DEVICES)] = 1
    devices_per_node: Annotated[int, Field(ge=1, le=1024)]
    memory_bytes: Annotated[int, Field(gt=0, le=2**50)]
    flops_per_second: dict[Dtype, Rate]
    memory_bytes_per_second: Rate
    launch_seconds: Duration
    efficiency: dict[OpClass, Efficiency] = {}
    intra: Link
    inter: Link
    overlap: bool
    share: Fraction = 1.0
    sources: dict[Text, Text] = {}

    @model_validator(mode="after")
    def _consistent(self) -> "Cluster":
        if "float32" not in self.flops_per_second:
            raise ValueError("flops_per_second needs at least float32, the rate that other dtypes fall back to")
        if self.devices > MAX_DEVICES:
            raise ValueError(f"{self.nodes} nodes x {self.devices_per_node} devices are more than {MAX_DEVICES:,} devices")
        if len(self.sources) > 64:
            raise ValueError("more than 64 sources")
        return self

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node

    def rate(self, dtype: str) -> float:
        """Peak FLOPs per second in this dtype ("bfloat16"); a dtype without a figure counts as float32."""
        return self.flops_per_second.get(dtype, self.flops_per_second["float32"])  # type: ignore[call-overload, no-any-return]

    def resized(self, nodes: int, devices_per_node: int) -> "Cluster":
        """The same devices and links in another number."""
        return _validated({**self.model_dump(), "nodes": nodes, "devices_per_node": devices_per_node}, f"{nodes}x{devices_per_node} {self.name}")

    @staticmethod
    def presets() -> tuple[str, ...]:
        return tuple(sorted(entry.name.removesuffix(".toml") for entry in _folder().iterdir() if entry.name.endswith(".toml")))

    @staticmethod
    def preset(name: str, nodes: int | None = None, devices_per_node: int | None = None) -> "Cluster":
        """A named preset, resized where numbers are given. Raises ClusterError for an unknown name."""
        if name not in Cluster.presets():
            raise ClusterError(f"there is no cluster preset {name[:80]!r}; write one of {', '.join(Cluster.presets())}, or the path of a .toml file")
        cluster = _parsed(_folder().joinpath(f"{name}.toml").read_text("utf-8"), f"preset {name}")
        return cluster.resized(nodes or cluster.nodes, devices_per_node or cluster.devices_per_node)

    @staticmethod
    def load(path: str | Path) -> "Cluster":
        """A cluster file (TOML, the form of the presets). Raises ClusterError where it is missing, too large or malformed."""
        return _parsed(read_text(Path(path), MAX_FILE_BYTES, ClusterError, "cluster file"), str(path))

    @staticmethod
    def parse(gpus: "int | str | Path | Cluster") -> "Cluster":
        """The `gpus` argument: a number of devices like those at hand, "16x8 h100-sxm", "8 h100-sxm", a preset, a path, or a Cluster."""
        if isinstance(gpus, Cluster):
            return gpus
        if isinstance(gpus, bool) or not isinstance(gpus, int | str | Path):
            raise ClusterError(f'gpus is a {type(gpus).__name__}; write a number, "2x8 h100-sxm", a Cluster, or the path of a .toml file')
        if isinstance(gpus, int):
            if not 1 <= gpus <= MAX_DEVICES:
                shown = f"{gpus:,}" if abs(gpus) < 10**30 else "more than 10^30"
                raise ClusterError(f"gpus={shown}: there is no such number of devices; write a number between 1 and {MAX_DEVICES:,}")
            from partitioner.calibrate import local_cluster  # calibrate needs the types of this file

            return local_cluster(gpus)
        if isinstance(gpus, Path):
            return Cluster.load(gpus)
        return _from_text(gpus.strip())

    def __str__(self) -> str:
        size = f"{self.nodes}x{self.devices_per_node}" if self.nodes > 1 else f"{self.devices_per_node}"
        return f"{size} {self.name} ({self.device}, {format_bytes(self.memory_bytes)} each)"


def _folder() -> Any:
    return resources.files("partitioner") / "clusters"


def _from_text(text: str) -> Cluster:
    sized = re.fullmatch(r"(?:(\d{1,7})\s*[xX]\s*)?(\d{1,7})\s+(\S.*)", text)
    if sized is None:
        return Cluster.load(text) if text.endswith(".toml") else Cluster.preset(text)
    nodes, devices, name = sized[1], int(sized[2]), sized[3]
    cluster = Cluster.load(name) if name.endswith(".toml") else Cluster.preset(name)
    if nodes is not None:
        return cluster.resized(int(nodes), devices)
    if devices <= cluster.devices_per_node or cluster.device == "cpu":
        return cluster.resized(1, devices)
    if devices % cluster.devices_per_node:
        raise ClusterError(
            f"{devices} devices do not fill nodes of {cluster.devices_per_node} {name}; write nodes x devices, "
            f'for instance "{-(-devices // cluster.devices_per_node)}x{cluster.devices_per_node} {name}"'
        )
    return cluster.resized(devices // cluster.devices_per_node, cluster.devices_per_node)


def _parsed(text: str, where: str) -> Cluster:
    if any(line.count(".") > MAX_DOTS for line in text.splitlines()):  # a key of thousands of parts takes tomllib minutes and gigabytes
        raise ClusterError(f"{where} has a line with more than {MAX_DOTS} dots; compare it with the presets in partitioner/clusters")
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise ClusterError(f"{where} is no TOML: {str(error)[:200]}; compare it with the presets in partitioner/clusters") from None
    if isinstance(data.get("memory_bytes"), str):
        data["memory_bytes"] = parse_bytes(data["memory_bytes"], ClusterError)
    return _validated(data, where)


def _validated(data: dict[str, Any], where: str) -> Cluster:
    try:
        return Cluster.model_validate(data)
    except ValidationError as error:
        raise ClusterError(f"{where} is no cluster: {problems(error, data)}; compare it with the presets in partitioner/clusters") from None


def problems(error: ValidationError, data: Any) -> str:
    """The first few problems that validation found in `data`, one line: `intra.alpha_seconds: Input should be a finite number (found nan)`."""
    lines = []
    for item in error.errors(include_url=False, include_input=False)[:4]:  # inputs would be copied, the whole of `data` for every missing field
        place = ".".join(str(part)[:60] for part in item["loc"][:8])
        place += ": " if place else ""
        value = data
        for part in item["loc"]:
            known = (isinstance(value, dict) and part in value) or (isinstance(value, list) and isinstance(part, int) and part < len(value))
            value = value[part] if known else None
        told = item["type"] in ("missing", "json_invalid") or value is None or isinstance(value, dict | list | BaseModel)
        lines.append(f"{place}{item['msg'].removeprefix('Value error, ')[:300]}" + ("" if told else f" (found {_brief(value)})"))
    more = error.error_count() - len(lines)
    return "; ".join(lines) + (f"; and {more} more" if more else "")


def _brief(value: object) -> str:
    if isinstance(value, int) and abs(value) >= 10**30:
        return "an integer beyond 10^30"
    return repr(value)[:60]
