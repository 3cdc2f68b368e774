"""The command line, verb by verb. Verbs that only read files import neither torch nor the model."""

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer

from partitioner import cli_plan
from partitioner.cli_output import STATUSES, guarded, print_json, print_table, written
from partitioner.cluster import Cluster
from partitioner.plan import Plan

app = typer.Typer(
    name="partitioner",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=STATUSES,
)

PlanFile = Annotated[Path, typer.Argument(metavar="PLAN.JSON", help="A plan that `partitioner plan -o` or `plan.save` wrote.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, errors too.", show_default=False)]

app.command("plan", epilog=STATUSES)(cli_plan.plan)


@app.callback(invoke_without_command=True)
def _root(shown: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False) -> None:
    """Plan the training of a plain PyTorch model on many devices, and read plans.

    Write a function that returns the model and one global batch, on meta if you like, and plan it, for devices that need not be here:

        partitioner plan models.py:llama --gpus 16x8 --device h100-sxm -o plan.json

        partitioner explain plan.json

        partitioner draw plan.json --memory memory.svg --model models.py:llama

    Then train by it: `auto_parallelize(model, gpus=128, plan=Plan.load("plan.json"), …)` under torchrun.
    """
    if shown:
        try:
            print(version("torch-partitioner"))
        except PackageNotFoundError:
            print("a checkout that is not installed")
        raise typer.Exit


@app.command(epilog=STATUSES)
@guarded
def show(plan: PlanFile, as_json: Json = False) -> None:
    """Print a plan on one screen: blocks, memory, time, and what every rank runs on the whole batch."""
    read = Plan.load(plan)
    print(read.to_json() if as_json else read)


@app.command(epilog=STATUSES)
@guarded
def explain(plan: PlanFile, model: cli_plan.Model = None, device: cli_plan.BoundDevice = None, as_json: Json = False) -> None:
    """Say why this plan: what the usual ways to train would take, why each was not chosen, what limits the step."""
    read = Plan.load(plan)
    if model is not None:
        read = cli_plan.bound(read, model, device)
    if as_json:
        from partitioner.explain import as_data

        print_json(as_data(read))
    else:
        print(read.explain())


@app.command(epilog=STATUSES)
@guarded
def diff(
    before: PlanFile,
    after: Annotated[Path, typer.Argument(metavar="OTHER.JSON", help="The plan to compare it with.", show_default=False)],
    as_json: Json = False,
) -> None:
    """Say what differs between two plans: decisions, runs of blocks, predictions. To differ is no failure."""
    from partitioner.diff import differences

    one, other = Plan.load(before), Plan.load(after)
    if as_json:
        print_json(differences(one, other).as_dict())
    else:
        print(one.diff(other))


@app.command(epilog=STATUSES)
@guarded
def draw(
    plan: PlanFile,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="The graph, as .svg, .pdf or .png.", show_default="graph.svg")] = None,
    timeline: Annotated[Path | None, typer.Option(help="The streams of a step over time; .json: a Chrome trace. Needs --model.")] = None,
    memory: Annotated[Path | None, typer.Option(help="Bytes by kind over a step. Needs --model.")] = None,
    model: cli_plan.Model = None,
    device: cli_plan.BoundDevice = None,
    as_json: Json = False,
) -> None:
    """Draw a plan. With --model the graph also shows ops, traffic and what passes between blocks."""
    read = Plan.load(plan)
    if model is not None:
        read = cli_plan.bound(read, model, device)
    graph = out or (Path("graph.svg") if timeline is None and memory is None else None)
    wanted = [(read.draw, graph), (read.draw_timeline, timeline), (read.draw_memory, memory)]
    made = [drawing(path) for drawing, path in wanted if path is not None]
    if as_json:
        print_json({"files": [str(path) for path in made]})
    for path in made:
        written(path)


@app.command(epilog=STATUSES)
@guarded
def simulate(
    plan: PlanFile,
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome trace (.json) for Perfetto. Needs --model.", show_default=False)] = None,
    model: cli_plan.Model = None,
    device: cli_plan.BoundDevice = None,
    as_json: Json = False,
) -> None:
    """Print the simulated step of every rank: as planned, or, with --model, simulated anew with what each stream does."""
    from partitioner.cli_tables import data, table

    if trace is not None and trace.suffix != ".json":
        raise typer.BadParameter(f"{trace} does not end in .json", param_hint="--trace")
    read = Plan.load(plan)
    if model is not None:
        read = cli_plan.bound(read, model, device)
    if trace is not None:
        read.draw_timeline(trace)
    if as_json:
        print_json({"ranks": data(read), "trace": trace and str(trace)})
    else:
        print_table(table(read))
    if trace is not None:
        written(trace)


@app.command(epilog=STATUSES)
@guarded
def clusters(as_json: Json = False) -> None:
    """List the devices that `--device` knows. A .toml file of the same form describes any other."""
    from partitioner.cli_tables import cluster_data, cluster_table

    presets = [Cluster.preset(name) for name in Cluster.presets()]
    if as_json:
        print_json([cluster_data(preset) for preset in presets])
    else:
        print_table(cluster_table(presets))


def main() -> None:
    """The console script `partitioner`."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a terminal that cannot show "→" shows its code
    app()
