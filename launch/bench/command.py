"""`bench`: which subcommand is which measurement.

Knows: the list. Does not know: how anything is measured, or what the command line may say (bench/options.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from launch.bench.flips import flips
from launch.bench.latency import latency
from launch.bench.options import BenchCommand, FlipsOptions, LatencyOptions
from launch.bench.serve import DrawLoad, serve
from launch.bench.serve_options import ServeOptions
from launch.bench.session import OpenEngine, open_session
from launch.bench.throughput import throughput


def run(
    command: BenchCommand, environ: Mapping[str, str], open_engine: OpenEngine, draw: DrawLoad | None = None
) -> int:
    """The whole command on this rank; returns its exit code.

    ``draw``: what draws the results of `bench serve`; without it they are not drawn.

    Raises UsageError, ConfigError, RendezvousError or ModelConfigError for a command line that cannot work, BenchError
    when what was to be measured did not happen, and whatever the engine raises.
    """
    options = command.options
    if isinstance(options, FlipsOptions):
        return flips(*options.results)
    session = open_session(command, environ, open_engine)
    if isinstance(options, ServeOptions):
        return serve(session, options, draw)
    return latency(session, options) if isinstance(options, LatencyOptions) else throughput(session, options)
