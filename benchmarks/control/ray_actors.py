"""Ray: an actor a worker, arrays as arguments and results.

python -m benchmarks.control.ray_actors WORKERS
"""

from __future__ import annotations

import sys

import ray

from benchmarks.control.echo import Array, serve


@ray.remote(num_cpus=0)
class Echo:
    def echo(self, part: Array) -> Array:
        return part


def main() -> None:
    num_workers = int(sys.argv[1])
    ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=512 << 20
    )
    actors = [Echo.remote() for _ in range(num_workers)]

    def call(parts: list[Array]) -> list[Array]:
        return ray.get([actor.echo.remote(part) for actor, part in zip(actors, parts, strict=True)])

    try:
        serve(num_workers, call)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
