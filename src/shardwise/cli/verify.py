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
_Against = Annotated[
    str | None,
    typer.Option(
        metavar="WORDS",
        help="A second layout, whose run is the reference in place of torch's own loop in one process.",
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
_TOKENS = 12
"""Tokens of a sequence in the batch of a model that was made smaller."""
_AsJson = Annotated[bool, typer.Option("--json", help="Print the verdict as JSON, and nothing else.")]


def command(
    subject: _Subject,
    example: _Example = None,
    layout: _Layout = None,
    steps: _Steps = 3,
    only_static: _Static = False,
    isolate: _Isolate = False,
    explains: _Explain = False,
    against: _Against = None,
    overrides: _Overrides = None,
    as_json: _AsJson = False,
) -> None:
    """Run a model in one process and on a layout's ranks, and compare every gradient, moment and weight.

    The exit code is 0 if the layout is equal to one process, 1 if it is not, and 2 if this cannot be verified.
    """
    options = {
        "steps": steps,
        "only_static": only_static,
        "against": against,
        "isolate": isolate,
        "explains": explains,
    }
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
    """Return the verdict on a configuration or on a user's model, and keep the record of a pass."""
    from shardwise.base.errors import ConfigError, UsageError
    from shardwise.base.target import load_target
    from shardwise.cli.examples import named
    from shardwise.config.run import load
    from shardwise.models import GptPolicy, build
    from shardwise.verify.layout import layout_of, parse_layout
    from shardwise.verify.passed import keep, proof_of
    from shardwise.verify.run import verify

    batch: Any = None if example is None else load_target("--example", example)
    batch = batch() if callable(batch) else batch
    module, separator, name = subject.partition(":")
    if separator and name.isidentifier() and "/" not in module:
        if batch is None:
            raise UsageError("verify: MODULE:MODEL needs --example MODULE:BATCH, the global batch of a step")
        return _of_target(subject, batch, layout, overrides, options)
    config = load(named(subject), overrides)
    if config.model is None:
        raise ConfigError(
            f"{subject}: model is missing; verify needs a model, or MODULE:MODEL with --example"
        )
    own = layout_of(config) if layout is None else parse_layout(layout)
    if batch is not None:
        policy = config.model
        found = verify(lambda: build(policy), config, batch, layout=layout, **options)  # type: ignore[arg-type]
    elif isinstance(config.model, GptPolicy):
        found = _of_gpt(config, layout, options)
    else:
        raise UsageError(f"verify: {subject}: give --example MODULE:BATCH, the global batch of a step")
    keep(proof_of(config, own), found)
    return found


def _of_target(
    subject: str, batch: Any, layout: str | None, overrides: tuple[str, ...], options: "dict[str, Any]"
) -> "Verdict":
    """Return the verdict on a user's function that makes a model, made smaller if the model has a configuration."""
    from shardwise.base.target import load_target
    from shardwise.config.run import load
    from shardwise.verify.layout import layout_of, parse_layout
    from shardwise.verify.passed import keep, proof_of
    from shardwise.verify.run import verify
    from shardwise.verify.shrink import shrink_batch, shrink_layout, shrink_model, uneven_axes

    make, config = load_target("MODULE:MODEL", subject), load({}, overrides)
    before = layout_of(config) if layout is None else parse_layout(layout)
    chosen, changed = shrink_layout(before, layout is not None, uneven_axes(config, before))
    small = shrink_model(make, chosen, before)
    shrunk = {key: list(value) for key, value in {**changed, **small.shrunk}.items()}
    if "vocab_size" in small.shrunk:
        samples = 2 * (config.batch.accumulation or 1) * chosen.mesh.size("dp")
        batch = shrink_batch(batch, samples, _TOKENS, small.shrunk["vocab_size"].new)
    found = verify(
        small.make, config, batch, layout=str(chosen), shrunk=shrunk, overrides=overrides, **options
    )
    if not small.shrunk:
        found.left_out.append(
            "the shrink: the model has no configuration of transformers, so it runs whole, as it was made"
        )
    keep(proof_of(config, before, subject), found)
    return found


def _of_gpt(config: Any, layout: str | None, options: "dict[str, Any]") -> "Verdict":
    """Return the verdict on a built-in GPT that is made smaller, with random tokens."""
    import torch

    from shardwise.config.run import load
    from shardwise.models import build
    from shardwise.verify.layout import layout_of, parse_layout
    from shardwise.verify.run import verify
    from shardwise.verify.shrink import shrink_config, shrink_layout, uneven_axes

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
