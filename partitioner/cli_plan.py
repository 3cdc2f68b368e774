"""`partitioner plan`, and how a plan file is bound to its model again."""

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from partitioner.cli_output import guarded, working, written
from partitioner.cluster import Cluster
from partitioner.errors import ClusterError
from partitioner.plan import Plan

Model = Annotated[
    str | None,
    typer.Option("--model", metavar="MODULE:FACTORY", help="The model the plan was made for, to lower and simulate it anew.", show_default=False),
]
BoundDevice = Annotated[
    str | None,
    typer.Option("--device", metavar="NAME", help="With --model: the preset or .toml of the plan's devices.", show_default=False),
]
_Text = str | None


@guarded
def plan(
    factory: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FACTORY",
            help="A function of a module (dotted name, or path of a .py file) that returns (model, args), or a dict with `model` and any of `args`, "
            "`kwargs`, `loss`, `targets`: one global batch, real, fake or on meta.",
            show_default=False,
        ),
    ],
    gpus: Annotated[str, typer.Option(metavar="N", help="How many devices: 8, or nodes x devices: 16x8.")] = "1",
    device: Annotated[_Text, typer.Option(metavar="NAME", help="See `partitioner clusters`; or a .toml.", show_default="devices at hand")] = None,
    memory: Annotated[_Text, typer.Option(metavar="BYTES", help="What one device may hold, such as 80GB.", show_default="all of it")] = None,
    optimizer: Annotated[str, typer.Option(metavar="NAME", help="The optimizer that memory is planned for.")] = "adamw",
    precision: Annotated[str, typer.Option(metavar="NAME")] = "fp32",
    batch_dim: Annotated[int | None, typer.Option(metavar="DIM", help="The batch dim of every input.", show_default="found by propagation")] = None,
    constraint: Annotated[
        list[str] | None,
        typer.Option("-c", "--constraint", metavar="KEY=VALUE", help="A decision to pin: shard=zero3, checkpoint=full, micro_batches=4. May recur."),
    ] = None,
    verify: Annotated[bool, typer.Option(help="Compare the capture with the model itself, where it has weights.")] = True,
    out: Annotated[Path | None, typer.Option("-o", "--out", metavar="PLAN.JSON", help="Write it here, explained.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON, errors too.", show_default=False)] = False,
) -> None:
    """Decide how to train a model on so many devices, and print the plan. Nothing is trained, and the devices need not be here."""
    pinned = _constraints(constraint or [])
    with working("planning"):
        from partitioner.api import make_plan
        from partitioner.cli_factory import made_by
        from partitioner.progress import tell

        tell(f"making {factory}")
        made = make_plan(
            **made_by(factory),
            gpus=_gpus(gpus, device),
            batch_dim="auto" if batch_dim is None else batch_dim,
            optimizer=optimizer,
            precision=precision,
            memory=memory,
            constraints=pinned or None,
            verify=verify,
        )
        if out is not None:
            made.save(out)
    print(made.to_json() if as_json else made)
    if out is not None:
        written(out)


def bound(read: Plan, factory: str, device: str | None) -> Plan:
    """The plan lowered for its model again. Raises PlanError where it belongs to another, ClusterError where its devices are not known by name."""
    with working("binding"):
        from partitioner.api import make_plan
        from partitioner.cli_factory import made_by

        arguments = made_by(factory)
        return make_plan(**arguments, gpus=_devices_of(read, device), verify=False, plan=read)


def _devices_of(read: Plan, device: str | None) -> int | str:
    cluster = read.cluster
    if device is not None or cluster.name in Cluster.presets():
        return f"{cluster.nodes}x{cluster.devices_per_node} {device or cluster.name}"
    from partitioner.calibrate import local_cluster

    if local_cluster(read.ranks).name == cluster.name:
        return read.ranks
    raise ClusterError(
        f"the plan was made for {cluster.name[:80]!r}, which is neither a preset nor the device at hand; give its description, --device FILE.toml, "
        f"or a preset to simulate it on: {', '.join(Cluster.presets())}"
    )


def _gpus(gpus: str, device: str | None) -> int | str:
    if device is not None:
        return f"{gpus} {device}"
    return int(gpus) if re.fullmatch(r"-?\d{1,30}", gpus.strip()) else gpus


def _constraints(given: list[str]) -> dict[str, Any]:
    pinned: dict[str, Any] = {}
    for item in given:
        key, equals, value = item.partition("=")
        if not equals or not key.strip():
            raise typer.BadParameter(f"{item!r} is not KEY=VALUE; write for instance -c shard=zero3", param_hint="--constraint")
        if key.strip() in pinned:
            raise typer.BadParameter(f"{key.strip()!r} is given twice", param_hint="--constraint")
        pinned[key.strip()] = int(value) if re.fullmatch(r"\s*-?\d{1,18}\s*", value) else value.strip()
    return pinned
