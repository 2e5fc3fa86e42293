"""What is about to be served: a target, the engine's settings and, if any, a drafter known to fit.

Everything a user can get wrong is found here, before an engine starts.  Called by `serve/run.py`.
"""

from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from recipes.errors import UserError
from recipes.load import load_recipe, resolve_model
from recipes.manifest import CheckpointManifest, identify_target, read_manifest
from recipes.problems import describe_problem
from recipes.schema import Section, Serve, Target
from serve.adopt import Adopted, adopt
from serve.baselines import Baseline
from serve.checkpoint import DrafterSummary, check_checkpoint
from serve.engine import check_budget, check_reserve

MANIFEST_NAME = "draftsmith.json"


class Settings(Section):
    """The two sections of a recipe that an engine needs; `serve.server` hands them to its child as a file."""

    target: Target
    serve: Serve
    baseline: Baseline | None = None
    """Drafts in the place of a checkpoint; no section, and only measuring asks for one."""


@dataclass(frozen=True)
class Request:
    """What the command line asks for, unchecked.  At most one of recipe, target and settings is given."""

    ckpt: Path | None
    recipe: Path | None
    target: str | None
    settings: Path | None
    budget: int | None
    adapts: bool = False
    reserve_chain: int | None = None
    """None: as the recipe says."""


@dataclass(frozen=True)
class Plan:
    """What will be served, checked."""

    target: Target
    serve: Serve
    ckpt: Path | None
    """The folder itself, `latest` resolved; or a copy in the published format."""
    adopted: Adopted | None
    """How it came to be that."""
    drafter: DrafterSummary | None
    budget: int | None
    adapts: bool
    fingerprint: str | None
    """Of the target; None where the checkpoint does not say for which it was made."""
    baseline: Baseline | None = None


def make_plan(request: Request) -> Plan:
    """Raises UserError for whatever cannot be served."""
    check_budget(request.budget)
    adopted = adopt(_find_checkpoint(request.ckpt)) if request.ckpt else None
    ckpt = adopted.ckpt if adopted else None
    manifest = _read_manifest(ckpt) if ckpt else None
    settings = _choose_settings(request, manifest)
    serve = _reserve(settings.serve, request)
    if ckpt and manifest:
        _check_identity(ckpt, manifest, settings.target)
    drafter = _check_drafter(ckpt, settings.target) if ckpt else None
    fingerprint = manifest.target.fingerprint if manifest else None
    return Plan(
        settings.target,
        serve,
        ckpt,
        adopted,
        drafter,
        request.budget,
        request.adapts,
        fingerprint,
        settings.baseline,
    )


def _find_checkpoint(ckpt: Path) -> Path:
    if not ckpt.is_dir():
        raise UserError(f"--ckpt {ckpt}: found no such folder; name one like runs/demo/checkpoints/latest")
    return ckpt.resolve()


def _read_manifest(ckpt: Path) -> CheckpointManifest | None:
    """None for a checkpoint that somebody else published."""
    path = ckpt / MANIFEST_NAME
    return read_manifest(path, CheckpointManifest) if path.is_file() else None


def _check_drafter(ckpt: Path, target: Target) -> DrafterSummary:
    return check_checkpoint(ckpt, resolve_model(target.model), target.revision)


def _choose_settings(request: Request, manifest: CheckpointManifest | None) -> Settings:
    sources = {"--recipe": request.recipe, "--target": request.target, "--settings": request.settings}
    given = [name for name, value in sources.items() if value is not None]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} each say what the target is: give one of them")
    if request.recipe:
        recipe = load_recipe(request.recipe)
        return Settings(target=recipe.target, serve=recipe.serve)
    if request.target:
        return Settings(target=Target(model=request.target), serve=Serve())
    if request.settings:
        return Settings.model_validate_json(request.settings.read_text())
    return _settings_of_checkpoint(request, manifest)


def _settings_of_checkpoint(request: Request, manifest: CheckpointManifest | None) -> Settings:
    if request.ckpt is None:
        raise UserError("nothing to serve: give --ckpt, --recipe or --target")
    if manifest is None:
        raise UserError(
            f"{request.ckpt} has no {MANIFEST_NAME} that names its target:"
            " add --recipe RECIPE or --target MODEL, the model it was made for"
        )
    try:
        return Settings.model_validate({name: manifest.recipe.get(name) for name in Settings.model_fields})
    except ValidationError as invalid:
        lines = [describe_problem(details) for details in invalid.errors()]
        source = f"{request.ckpt / MANIFEST_NAME}: its recipe does not load; add --recipe RECIPE"
        raise UserError("\n  ".join([source, *lines])) from invalid


def _reserve(serve: Serve, request: Request) -> Serve:
    """The settings with what the command line reserves."""
    if request.reserve_chain is not None:
        serve = serve.model_copy(update={"reserve_chain": request.reserve_chain})
        if serve.reserve_chain and not request.budget:
            raise UserError(
                f"--reserve-chain {serve.reserve_chain} is of draft trees, and none are asked for: give a"
                " number of nodes in --budget, or leave it out"
            )
    check_reserve(serve, adapts=request.adapts)
    return serve


def _check_identity(ckpt: Path, manifest: CheckpointManifest, target: Target) -> None:
    made_for, found = manifest.target, identify_target(target)
    if made_for.fingerprint != found.fingerprint:
        raise UserError(
            f"{ckpt} is a checkpoint for another target: it was made for {made_for.model}"
            f" ({made_for.fingerprint[:12]}), {target.model} is {found.fingerprint[:12]} now;"
            " serve it with its own target, or distil a drafter for this one"
        )
