"""`spmd-rl serve`: a model or a checkpoint at the endpoints of the gateway."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from spmd_rl.cli.help import HELP_FLAGS, all_lines
from spmd_rl.cli.launcher import end_signals
from spmd_rl.cli.rank import raise_open_file_limit
from spmd_rl.config.load import load
from spmd_rl.controller.run.recipe import overrides_of
from spmd_rl.errors import ConfigError
from spmd_rl.hooks.texts import EpisodeTexts
from spmd_rl.mkl import warm_up_functions
from spmd_rl.model.tokenizer import load_tokenizer
from spmd_rl.rollout.episode_samples import ModelLimits
from spmd_rl.rollout.native.engine import NativeEngine
from spmd_rl.serve.config import KEY_VARIABLE, ServeConfig
from spmd_rl.serve.engine_thread import EngineThread
from spmd_rl.serve.served_model import ServedModel

if TYPE_CHECKING:
    from spmd_rl.gateway.http_server import HttpServer

USAGE = """\
usage: spmd-rl serve MODEL_OR_RUN [--a.b=c ...]

Answer OpenAI chat completions, completions and Responses, Anthropic messages and token ids for a
Hugging Face folder, a run (its newest checkpoint) or a folder in its checkpoints, until Ctrl-C."""


def main(words: list[str]) -> int:
    """Serve what `words` name. Blocks: until a signal ends it.

    Raises: ConfigError for settings, a folder or an address that cannot be.
    """
    if not words or HELP_FLAGS & set(words):
        print("\n".join([USAGE, *all_lines(ServeConfig, "settings")]))
        return 0 if words else 2
    if words[0].startswith("-"):
        raise ConfigError(f"spmd-rl serve {words[0]}: name the folder first")
    cfg, served = settings_of(words)
    server = _listen(cfg)
    raise_open_file_limit()
    warm_up_functions()
    name = cfg.name or _name_of(Path(words[0]))
    print(f"reading {served.checkpoint or served.folder} ...", flush=True)
    tokenizer = load_tokenizer(served.folder)
    engine = served.engine(cfg.engine, _device(cfg), lambda ids: tokenizer.decode(list(ids)))
    texts = EpisodeTexts(lambda: tokenizer)
    asyncio.run(_serve(cfg, server, engine, texts, name))
    return 0


def settings_of(words: list[str]) -> tuple[ServeConfig, ServedModel]:
    """Return the settings of a command line, and the model that its first word names.

    The settings of a run come before the defaults, and the environment may have the key.
    Raises: ConfigError.
    """
    key = os.environ.get(KEY_VARIABLE, "")
    found: list[ServedModel] = []

    def defaults(
        table: dict[str, Any], given: Mapping[str, str], file: Path | None
    ) -> dict[str, Any]:
        which = {name: given.get(name, "") for name in ("step", "role", "model")}
        found.append(ServedModel.find(Path(words[0]), **which))
        return table | found[0].own_settings() | ({"key": key} if key else {})

    cfg = load(ServeConfig, None, overrides_of(words[1:]), defaults)
    return cfg, found[0]


def _name_of(path: Path) -> str:
    return path.resolve().name or "policy"


def _device(cfg: ServeConfig) -> torch.device:
    """Return where the engine computes. Raises: ConfigError for a GPU that is not there."""
    found = torch.cuda.is_available()
    if cfg.device == "cuda" and not found:
        raise ConfigError("--device cuda: torch sees no GPU here")
    return torch.device("cuda", 0) if found and cfg.device != "cpu" else torch.device("cpu")


def _listen(cfg: ServeConfig) -> HttpServer:
    """Return the server, which listens already. Raises: ConfigError."""
    try:
        from spmd_rl.gateway.http_server import HttpServer  # its packages are an extra
    except ImportError as error:
        raise ConfigError(
            "spmd-rl serve needs the packages of the extra 'agents': pip install -e '.[agents]' "
            f"in the repository of spmd_rl ({error})"
        ) from error
    return HttpServer(cfg.gateway, cfg.port)


async def _serve(
    cfg: ServeConfig, server: HttpServer, engine: NativeEngine, texts: EpisodeTexts, name: str
) -> None:
    """Answer requests. Blocks: until a signal comes, or the engine fails, which is raised."""
    from spmd_rl.gateway.app import App
    from spmd_rl.gateway.plan import SessionParts
    from spmd_rl.gateway.replies import choose_format
    from spmd_rl.serve.served_turns import ServedSessions, ServedTurns
    from spmd_rl.serve.token_scores import score

    replies = choose_format(cfg.gateway.response_template, texts.chat_template, "gateway")
    parts = SessionParts(cfg.gateway, texts, replies, name, settings="gateway")
    ended = _ended_by_signal()
    thread = EngineThread(engine)
    sampling = cfg.sampling
    if not sampling.ignore_eos:
        more = (one for one in texts.eos_ids if one < engine.spec.vocab_size)
        sampling = replace(sampling, stop_ids=(*sampling.stop_ids, *more))
    limits, most = ModelLimits.of(engine.spec), cfg.gateway.max_waiting
    turns = ServedTurns(thread, partial(score, engine), sampling, limits, cfg.seed, most)
    version = engine.version or 0
    await server.start(App(ServedSessions(parts, turns, cfg.key, server.root_url, version)))
    keys = "with a key" if cfg.key else "for anyone on this host"
    print(f"serving {name} at {server.root_url}/v1 {keys}; Ctrl-C ends it", flush=True)
    try:
        await asyncio.wait([ended, thread.failure], return_when=asyncio.FIRST_COMPLETED)
    finally:
        await thread.close()  # so that no stream holds the server up
        await server.close()
    if thread.failure.done():
        thread.failure.result()


def _ended_by_signal() -> asyncio.Future[None]:
    """Return what is done once a signal asks this process to end; a second one ends it at once."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    numbers = end_signals()

    def end() -> None:
        for number in numbers:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
        ended.set_result(None)

    for number in numbers:
        loop.add_signal_handler(number, end)
    return ended
