"""The commands. Each reads its options, calls the subpackage that does the work, and prints what came of it.

Exit status: 0 done; 1 a problem with the input, named with what to change; 2 wrong usage; 130 interrupted.

JAX is imported by the commands that need it, so that help and wrong usage answer at once.
"""

import errno
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from shardzoo.cli import options
from shardzoo.cli.interrupts import uninterrupted
from shardzoo.cli.terminal import complain
from shardzoo.errors import InputError


def _commands() -> Any:
    """The module that does the work, and with it JAX."""
    with uninterrupted():
        from shardzoo.cli import commands
    return commands


EPILOG = "Exit status: 0 done, 1 a problem with the input, 2 wrong usage."


class Commands(typer.core.TyperGroup):
    """The one place where errors turn into messages and an exit status."""

    def invoke(self, ctx):
        try:
            return super().invoke(ctx)
        except InputError as error:
            raise _exit(str(error), 1) from error
        except KeyboardInterrupt as error:
            raise _exit(f"interrupted{_after_interrupt(ctx.invoked_subcommand)}", 130) from error
        except MemoryError as error:
            lower = "lower --memory-budget, or " if ctx.invoked_subcommand in ("convert", "export") else ""
            raise _exit(f"out of memory: {lower}use a machine with more memory, or smaller sizes", 1) from error
        except OSError as error:
            if error.errno == errno.EPIPE:  # the reader of our output has left: nobody to tell
                raise
            raise _exit(_os_message(error), 1) from error


def _exit(message: str, status: int) -> typer.Exit:
    complain(message)
    return typer.Exit(status)


def _after_interrupt(command: str | None) -> str:
    if command != "convert":
        return ""
    return ": the same command carries on from here; with --no-resume it starts clean"


def _os_message(error: OSError) -> str:
    name = error.filename2 or error.filename
    return f"{name}: {error.strerror or error}" if name is not None else str(error)


app = typer.Typer(
    name="shardzoo",
    cls=Commands,
    help="Convert PyTorch checkpoints, check how models split over meshes, restore and run them.",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Checkpoint = Annotated[
    Path, typer.Argument(metavar="CKPT", help="Checkpoint or pipeline folder that convert or save wrote.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
Budget = Annotated[
    int | None,
    typer.Option(
        parser=options.parse_bytes,
        metavar="SIZE",
        help="Most memory for tensors in flight, e.g. 200MiB.",
        show_default=False,
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace DST, once the new one is whole.")]
Family = Annotated[
    str | None, typer.Option(help="Family, when it cannot be told from config and keys.", show_default=False)
]
MOST_TOKENS, MOST_CELLS = 2**24, 2**16  # of what is traced: more is a slip of the finger
Batch = Annotated[int, typer.Option(min=1, max=MOST_CELLS, help="Rows of the input.")]
Component = Annotated[
    list[str] | None,
    typer.Option(
        help="Which model of several, e.g. language_model; of a pipeline any number, e.g. vae.", show_default=False
    ),
]
Config = Annotated[
    Path | None, typer.Option(help="A config.json that does not lie beside the weights.", show_default=False)
]
Prefix = Annotated[
    str | None,
    typer.Option(help="A prefix of all keys to take off, if it is not a usual one.", show_default=False),
]
Variant = Annotated[str | None, typer.Option(help="Which of several twin weight files, e.g. fp16.", show_default=False)]
Select = Annotated[
    str | None,
    typer.Option(help="Which dict of a PyTorch file that holds several, e.g. ema or state/model.", show_default=False),
]
Quantize = Annotated[
    str | None,
    typer.Option(
        parser=options.parse_quantize, metavar="KIND", help="Weights of the blocks in 8 bits: int8 or fp8.",
        show_default=False,
    ),
]  # fmt: skip
MESH_HELP = "How to split: data, pipe, context, tensor, e.g. context=2,tensor=4."


def _size(help: str, default: str, most: int = MOST_CELLS) -> Any:
    """Option for a size of the inputs; the command fills in the default, to know which sizes were given."""
    return typer.Option(min=1, max=most, help=help, show_default=default)


def _version(wanted: bool) -> bool:
    if wanted:
        print(f"shardzoo {version('shardzoo')}")
        raise typer.Exit
    return wanted


@app.callback()
def root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Convert PyTorch checkpoints, check how models split over meshes, restore and run them."""


@app.command(epilog=EPILOG)
def convert(
    source: Annotated[
        str,
        typer.Argument(metavar="SRC", help="Folder, index or weight file, or hf://owner/name[@revision]."),
    ],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="Checkpoint folder to write.")],
    family: Family = None,
    component: Component = None,
    config: Config = None,
    prefix: Prefix = None,
    variant: Variant = None,
    select: Select = None,
    dtype: Annotated[
        Any,
        typer.Option(parser=options.parse_dtype, metavar="DTYPE", help="Store floats as float32, bfloat16 or float16."),
    ] = None,
    quantize: Quantize = None,
    memory_budget: Budget = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything and say what would be written.")] = False,
    no_resume: Annotated[
        bool, typer.Option("--no-resume", help="Drop what an interrupted run left; start clean.")
    ] = False,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Convert a PyTorch checkpoint into an Orbax checkpoint that restores onto any mesh.

    Of a pipeline (a diffusers folder, or that of the Wan repositories) every component becomes a checkpoint below DST.
    The weights keep their bits unless --dtype is given. Memory stays within the budget whatever the model's size. An
    interrupted run leaves nothing that looks like a checkpoint, and the same command carries on from where it stopped.
    """
    _commands().convert(
        source,
        destination,
        family=family,
        component=component,
        config=config,
        prefix=prefix,
        variant=variant,
        select=select,
        dtype=dtype and dtype.name,
        quantize=quantize,
        memory_budget=memory_budget,
        dry_run=dry_run,
        resume=not no_resume,
        overwrite=overwrite,
        json=json,
    )


@app.command(epilog=EPILOG)
def inspect(checkpoint: Checkpoint, component: Component = None, json: Json = False) -> None:
    """Show what a checkpoint holds: family, config, sources, and every parameter with its shape, dtype and split."""
    _commands().inspect(checkpoint, component=component, json=json)


@app.command(epilog=EPILOG)
def audit(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="FAMILY/PRESET, a checkpoint folder, or a PyTorch folder or file.")
    ],
    mesh: Annotated[
        list[Any] | None,
        typer.Option(
            parser=options.parse_mesh,
            metavar="MESH",
            help=MESH_HELP + " May be given several times; with --chips not needed.",
            show_default=False,
        ),
    ] = None,
    chips: Annotated[
        str | None,
        typer.Option(
            help="Rank meshes of this slice by predicted time, e.g. v5e-8; of v4, v5p and v7x names count cores.",
            show_default=False,
        ),
    ] = None,
    topology: Annotated[
        str | None,
        typer.Option(help="Compile the forward pass for this TPU slice, e.g. v5e:2x4.", show_default=False),
    ] = None,
    compiles: Annotated[
        bool, typer.Option("--compile", help="With --chips: compile for them too, beside our own arithmetic.")
    ] = False,
    quick: Annotated[
        bool | None,
        typer.Option(
            "--quick/--full",
            help="Compile with little optimisation, in seconds, or all; more then stands in memory than on chip.",
            show_default="quick for many convolutions",
        ),
    ] = None,
    train: Annotated[
        bool, typer.Option("--train", help="Also gradients of all weights, and the moments that AdamW keeps.")
    ] = False,
    remat: Annotated[
        str | None,
        typer.Option(
            metavar="POLICY",
            help="With --train: blocks are computed again: all, attention, collectives, dots (zoo/remat.py).",
            show_default="everything is kept",
        ),
    ] = None,
    at_rest: Annotated[
        str | None,
        typer.Option(
            parser=options.parse_at_rest,
            metavar="AXIS",
            help="Weights split over data or context too while they are not used (FSDP).",
            show_default=False,
        ),
    ] = None,
    new_tokens: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_TOKENS, help="Text: memory of generating so many tokens.", show_default=False),
    ] = None,
    microbatches: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_CELLS,
            help="How long a pipeline's stages wait with so many; traced is one for each stage, as far as rows go.",
            show_default=False,
        ),
    ] = None,
    batch: Batch = 1,
    tokens: Annotated[int | None, _size("Length of each row of text.", "4096", MOST_TOKENS)] = None,
    frames: Annotated[int | None, _size("Length of a video.", "81")] = None,
    height: Annotated[int | None, _size("Of images and videos, in pixels.", "480")] = None,
    width: Annotated[int | None, _size("Of images and videos, in pixels.", "832")] = None,
    dtype: Annotated[
        Any,
        typer.Option(parser=options.parse_dtype, metavar="DTYPE", help="Of the weights, for all but the verdict."),
    ] = "bfloat16",
    html: Annotated[
        Path | None,
        typer.Option(help="Write a page that shows all of it here; it needs no network.", show_default=False),
    ] = None,
    quantize: Quantize = None,
    family: Family = None,
    component: Component = None,
    config: Config = None,
    prefix: Prefix = None,
    variant: Variant = None,
    select: Select = None,
    json: Json = False,
) -> None:
    """Check whether meshes fit a model, before any device or weight is touched.

    For a mesh that fits, says what each device holds, weights and what a pass needs beside them; for one that does not,
    everything that stops it and the nearest meshes that fit; for both each dim, and what stops larger degrees. The
    options that tell convert how to read a PyTorch source hold here too. With --chips ranks the meshes (all of that
    many chips, if none is given) by the time that matrix work, reading the weights and each collective take at the
    chip's published speeds, and says what would fit where nothing does. With --compile or --topology also compiles for
    TPUs that need not be there (by libtpu), and says what each device would need; autoencoders with little
    optimisation unless --full is given, which takes minutes. Exit status 1 if any given mesh does not fit, or none of
    the meshes fits the chips' memory.
    """
    if not mesh and chips is None:
        raise typer.BadParameter("give meshes to check, or chips to choose meshes for", param_hint="--mesh, --chips")
    if compiles and chips is None:
        raise typer.BadParameter("needs chips to compile for", param_hint="--compile")
    if quick is not None and not compiles and topology is None:
        raise typer.BadParameter("is for compiling: give --compile or --topology too", param_hint="--quick, --full")
    if remat is not None and not train:
        raise typer.BadParameter("is for training: give --train too", param_hint="--remat")
    if compiles and train:
        raise typer.BadParameter("compiles the forward pass alone: leave --train out", param_hint="--compile")
    with uninterrupted():
        from shardzoo.cli import audit as auditing
    asked = {"tokens": tokens, "frames": frames, "height": height, "width": width}
    given = {name: size for name, size in asked.items() if size is not None}
    sizes = auditing.TraceSizes(batch=batch, **given)
    ahead = auditing.Ahead(
        topology=topology,
        chips=chips,
        sizes=sizes,
        given=tuple(given),
        dtype=dtype,
        compile=compiles,
        effort=None if quick is None else "quick" if quick else "full",
        train=train,
        remat=remat == "all" or remat or False,
        at_rest=at_rest,
        new=new_tokens,
        microbatches=microbatches,
    )
    reading: dict[str, Any] = {
        "family": family,
        "component": component,
        "config": config,
        "prefix": prefix,
        "variant": variant,
        "select": select,
    }
    if not auditing.audit(target, mesh or [], ahead=ahead, quantize=quantize, html=html, json=json, **reading):
        raise typer.Exit(1)


@app.command(epilog=EPILOG)
def measure(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="Preset FAMILY/NAME, checkpoint, or PyTorch source.")],
    mesh: Annotated[Any, typer.Option(parser=options.parse_mesh, metavar="MESH", help=MESH_HELP)] = "one",
    steps: Annotated[int, typer.Option(min=1, max=1000, help="How many are measured.")] = 5,
    batch: Batch = 1,
    tokens: Annotated[int | None, _size("Length of each row of text.", "512", MOST_TOKENS)] = None,
    frames: Annotated[int | None, _size("Length of a video.", "5")] = None,
    height: Annotated[int | None, _size("Of images and videos, in pixels.", "256")] = None,
    width: Annotated[int | None, _size("Of images and videos, in pixels.", "256")] = None,
    dtype: Annotated[
        Any, typer.Option(parser=options.parse_dtype, metavar="DTYPE", help="Of weights and activations.")
    ] = "bfloat16",
    trace: Annotated[
        Path | None, typer.Option(help="Keep the profiler's trace in this folder.", show_default=False)
    ] = None,
    family: Family = None,
    component: Annotated[
        str | None, typer.Option(help="Which model of several in a PyTorch source.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """Run a forward pass where it is, with made-up weights, and show what it takes beside what audit predicts.

    Step time, the share of the device's peak that the model's own work reaches, time in collectives and how much of it
    nothing hides, idle time, memory, and the device that the others wait for, read off JAX's profiler. For a step of
    your own use `shardzoo.zoo.measure`. On a machine without accelerators it makes the CPU devices that the mesh needs.
    """
    with uninterrupted():
        from shardzoo.cli import measuring
    reading = {"family": family, "component": component}
    asked = {"tokens": tokens, "frames": frames, "height": height, "width": width}
    given = {name: size for name, size in asked.items() if size is not None}
    measuring.run(target, mesh, batch=batch, given=given, dtype=dtype, steps=steps, folder=trace, json=json, **reading)


@app.command(epilog=EPILOG)
def verify(
    checkpoint: Checkpoint,
    source: Annotated[
        str | None,
        typer.Argument(metavar="SRC", help="The source it was converted from.", show_default=False),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Without SRC: names, sizes and metadata only.")] = False,
    component: Component = None,
    variant: Variant = None,
    select: Select = None,
    json: Json = False,
) -> None:
    """Check every byte of a checkpoint against its digests and, with SRC, every tensor against its source."""
    if source is None and (variant is not None or select is not None):
        raise typer.BadParameter("are about SRC: give it, or leave them out", param_hint="--variant, --select")
    _commands().verify(checkpoint, source, quick=quick, component=component, variant=variant, select=select, json=json)


@app.command(epilog=EPILOG)
def export(
    checkpoint: Checkpoint,
    destination: Annotated[Path, typer.Argument(metavar="DST", help="Folder to write.")],
    layout: Annotated[
        str | None,
        typer.Option(help="Layout to write: that of the source, if not given.", show_default=False),
    ] = None,
    dequantize: Annotated[
        bool, typer.Option("--dequantize", help="Write quantized weights as they were rounded, in their full dtype.")
    ] = False,
    component: Component = None,
    memory_budget: Budget = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Write a checkpoint back as PyTorch files: bit for bit what came in, if it was not cast.

    With --layout the same values under the names of another published layout of the family, with its config.json.
    """
    _commands().export(
        checkpoint,
        destination,
        layout=layout,
        dequantize=dequantize,
        component=component,
        memory_budget=memory_budget,
        overwrite=overwrite,
        json=json,
    )


@app.command(epilog=EPILOG)
def generate(
    checkpoint: Checkpoint,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            help="Prompt; several make one batch, but of a video. Read from standard input if not given.",
            show_default=False,
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="Text: system message of the chat.", show_default=False)] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Text: continue the bare text, no chat template.")] = False,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Text: longest reply, in tokens.", show_default="128")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="Text: 0 takes the likeliest token.", show_default="0.0")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Text: sample among the k likeliest.", show_default=False)
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            min=0.0, max=1.0, help="Text: sample among the likeliest of this total probability.", show_default=False
        ),
    ] = None,
    negative: Annotated[
        str | None, typer.Option(help="Image, video: what guidance leads away from.", show_default="nothing")
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(
            help="Image: picture to edit, or to take from; several are possible. Video: picture to start with, scaled"
            " and cut to the size.",
            show_default=False,
        ),
    ] = None,
    last_image: Annotated[Path | None, typer.Option(help="Video: picture to end with.", show_default=False)] = None,
    height: Annotated[int | None, typer.Option(help="Image, video: in pixels.", show_default="the model's own")] = None,
    width: Annotated[int | None, typer.Option(help="Image, video: in pixels.", show_default="the model's own")] = None,
    frames: Annotated[
        int | None, typer.Option(help="Video: how many, 1 more than a multiple of 4.", show_default="81 or 121")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Image, video: steps of the sampler.", show_default="the model's own")
    ] = None,
    guidance: Annotated[
        list[float] | None,
        typer.Option(
            help="Image, video: scale of the guidance; twice for models of two experts, high noise first.",
            show_default="the model's own",
        ),
    ] = None,
    true_guidance: Annotated[
        float | None,
        typer.Option(
            help="Image: scale of the guidance away from --negative, for models that are told --guidance (FLUX.1).",
            show_default=False,
        ),
    ] = None,
    shift: Annotated[
        float | None,
        typer.Option(help="Image, video: shift of the noise levels, if not the pipeline's own.", show_default=False),
    ] = None,
    fps: Annotated[int | None, typer.Option(min=1, help="Video: frames a second.", show_default="16 or 24")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Image: FILE.png. Video: FILE.mp4. Either: a folder for PNG files.", show_default=False),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Image, video: replace --out, once the new one is made.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of the sampling.")] = 0,
    dtype: Annotated[
        Any,
        typer.Option(
            parser=options.parse_dtype, metavar="DTYPE", help="Dtype to run in: the stored one, if not given."
        ),
    ] = None,
    mesh: Annotated[Any, typer.Option(parser=options.parse_mesh, metavar="MESH", help=MESH_HELP)] = "one",
    offload: Annotated[
        bool,
        typer.Option("--offload", help="Keep the stacked blocks in host memory; one at a time comes to the devices."),
    ] = False,
    quantize: Quantize = None,
    lora: Annotated[
        list[Any] | None,
        typer.Option(
            parser=options.parse_lora,
            metavar="[PART:]FILE[=WEIGHT]",
            help="LoRA adapter and how much of it; may be given several times. PART is a component of a pipeline.",
            show_default=False,
        ),
    ] = None,
    lora_ignore: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Tensors of the adapters to leave out, by how their names begin or by a pattern with `*`"
            " (*.diff_b); may be given several times.",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Restore a language model and let it reply to a prompt, or a pipeline and let it make images or a video.

    Of a pipeline one component at a time is on the devices. On a machine without accelerators the command makes as
    many CPU devices as the mesh needs.
    """
    commands = _commands()
    commands.check_texts(prompt=prompt, system=system, negative=negative)
    text: dict[str, Any] = {
        "system": system,
        "raw": raw or None,
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
    }
    images: dict[str, Any] = {
        "negative": negative,
        "image": image,
        "last_image": last_image,
        "height": height,
        "width": width,
        "frames": frames,
        "steps": steps,
        "guidance": guidance,
        "true_guidance": true_guidance,
        "shift": shift,
        "fps": fps,
        "out": out,
        "overwrite": overwrite or None,
    }
    held: dict[str, Any] = {"offload": offload, "quantize": quantize, "lora": lora, "lora_ignore": lora_ignore}
    common: dict[str, Any] = {"seed": seed, "dtype": dtype, "degrees": mesh, "json": json, **held}
    if commands.makes_images(checkpoint):
        commands.refuse_options(checkpoint, "is a pipeline", text)
        commands.generate_images(checkpoint, commands.prompts(prompt), **images, **common)
    else:
        commands.refuse_options(checkpoint, "is no pipeline", images)
        commands.generate(checkpoint, commands.prompts(prompt), **text, **common)


@app.command(epilog=EPILOG)
def presets(
    family: Annotated[
        str | None, typer.Argument(metavar="FAMILY", help="Only this family.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """List the published sizes that the zoo knows, by the name that audit takes."""
    _commands().presets(family, json=json)
