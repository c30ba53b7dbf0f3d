"""The command `stretto generate`.

Generate text with the model of a run: continue a prompt, one token at a time.

example:
  stretto generate runs/book --prompt "Once upon a time" --length 300 --temperature 0.8
"""

import argparse
import sys

from stretto.cli.parser import Parser, add_model_arguments


def add_arguments(parser: Parser) -> None:
    add_model_arguments(parser)
    add = parser.add_argument
    add("--prompt", default="", metavar="TEXT", help="text to continue (default: a line break)")
    add("--length", type=int, default=200, metavar="N", help="number of tokens to generate (default: 200)")
    add(
        "--temperature", type=float, default=1.0, metavar="T",
        help="sampling temperature; 0 always takes the most likely token (default: 1)",
    )  # fmt: skip
    add("--top-k", type=int, metavar="N", help="sample from the N most likely tokens only")
    add("--top-p", type=float, metavar="P", help="sample from the smallest set of tokens with total probability >= P")
    add("--seed", type=int, default=0, metavar="N", help="random seed for sampling (default: 0)")
    add("--count", type=int, default=1, metavar="N", help="number of texts (default: 1)")


def run(options: argparse.Namespace) -> None:
    """Generate text and print it."""
    from stretto.cli.run_model import load_run_model
    from stretto.serve.generation import Sampling, generate

    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
    trained = load_run_model(options, options.device)
    if options.count == 1:
        # Print each piece as soon as it is generated.
        sys.stdout.write(options.prompt)
        for (piece,) in generate(trained, options.prompt, options.length, sampling):
            sys.stdout.write(piece)
            sys.stdout.flush()
        sys.stdout.write("\n")
        return
    pieces = generate(trained, options.prompt, options.length, sampling, count=options.count)
    texts = ["".join(parts) for parts in zip(*pieces, strict=True)]
    sys.stdout.write("\n---\n".join(f"{options.prompt}{text}" for text in texts) + "\n")
