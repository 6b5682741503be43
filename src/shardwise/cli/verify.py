"""``shardwise verify CONFIG | MODULE:MODEL``: the proof that a layout computes what one process computes."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from shardwise.verify.verdict import Verdict

_Subject = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG|MODULE:MODEL",
        help="A run as YAML or JSON, the name of an example, or a function that makes a model.",
    ),
]
_Example = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:BATCH",
        help="The global batch of a step, or a function that makes it; left out, tokens of a built-in GPT.",
    ),
]
_Layout = Annotated[
    str | None,
    typer.Option(
        metavar="WORDS", help='The layout, as "pp=2,tp=2,dp=2x2,zero=3"; left out, that of the configuration.'
    ),
]
_Steps = Annotated[int, typer.Option(min=2, help="Optimizer steps.")]
_Static = Annotated[
    bool, typer.Option("--static", help="Derive the placements of tensors along tp alone, without a process.")
]
_Isolate = Annotated[
    bool,
    typer.Option(
        "--isolate", help="On a failure, feed each module the reference's tensors, and list all wrong ones."
    ),
]
_Explain = Annotated[
    bool,
    typer.Option(
        "--explain", help="On a failure, list what ran between the last right tensor and the first wrong one."
    ),
]
_Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key, as in precision=bf16.")
]
_AsJson = Annotated[bool, typer.Option("--json", help="Print the verdict as JSON, and nothing else.")]


def command(
    subject: _Subject,
    example: _Example = None,
    layout: _Layout = None,
    steps: _Steps = 3,
    only_static: _Static = False,
    isolate: _Isolate = False,
    explains: _Explain = False,
    overrides: _Overrides = None,
    as_json: _AsJson = False,
) -> None:
    """Run a model in one process and on a layout's ranks, and compare every gradient, moment and weight.

    The exit code is 0 if the layout is equal to one process, 1 if it is not, and 2 if this cannot be verified.
    """
    options = {"steps": steps, "only_static": only_static, "isolate": isolate, "explains": explains}
    found = _verified(subject, example, layout, options, tuple(overrides or ()))
    typer.echo(found.to_json() if as_json else "\n".join(found.lines()))
    raise typer.Exit(found.exit_code)


def _verified(
    subject: str,
    example: str | None,
    layout: str | None,
    options: "dict[str, Any]",
    overrides: tuple[str, ...],
) -> "Verdict":
    """Return the verdict on a configuration or on a user's model."""
    import torch

    from shardwise.base.errors import ConfigError, UsageError
    from shardwise.base.target import load_target
    from shardwise.cli.examples import named
    from shardwise.config.run import load
    from shardwise.models import GptPolicy, build
    from shardwise.verify.layout import layout_of, parse_layout
    from shardwise.verify.run import verify
    from shardwise.verify.shrink import shrink_config, shrink_layout, uneven_axes

    batch: Any = None if example is None else load_target("--example", example)
    batch = batch() if callable(batch) else batch
    module, separator, name = subject.partition(":")
    if separator and name.isidentifier() and "/" not in module:
        if batch is None:
            raise UsageError("verify: MODULE:MODEL needs --example MODULE:BATCH, the global batch of a step")
        make = load_target("MODULE:MODEL", subject)
        return verify(make, {}, batch, layout=layout, overrides=overrides, **options)
    config = load(named(subject), overrides)
    if config.model is None:
        raise ConfigError(
            f"{subject}: model is missing; verify needs a model, or MODULE:MODEL with --example"
        )
    if batch is not None:
        policy = config.model
        return verify(lambda: build(policy), config, batch, layout=layout, **options)  # type: ignore[arg-type]
    if not isinstance(config.model, GptPolicy):
        raise UsageError(f"verify: {subject}: give --example MODULE:BATCH, the global batch of a step")
    if config.model.vocab is None:
        config = load(config, ["model.vocab=256"])
    before = parse_layout(layout) if layout is not None else layout_of(config)
    chosen, changed = shrink_layout(before, layout is not None, uneven_axes(config, before))
    small, sizes = shrink_config(config, chosen, before)
    text: Any = small.model
    samples = 2 * (small.batch.derived(chosen.mesh.size("dp")).accumulation or 1) * chosen.mesh.size("dp")
    generator = torch.Generator().manual_seed(0)
    shape = (2, samples, text.context)
    tokens, targets = torch.randint(0, text.vocab, shape, generator=generator)
    shrunk = {key: list(value) for key, value in {**changed, **sizes}.items()}
    return verify(lambda: build(text), small, (tokens, targets), layout=str(chosen), shrunk=shrunk, **options)
