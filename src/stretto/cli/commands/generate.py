"""`stretto generate`: text from a run's model."""

import sys

from stretto.cli.parser import Parser, add_model_arguments


def run(arguments: list[str]) -> None:
    """Parse and write."""
    options = make_parser().parse_all(arguments)
    from stretto.serve.generation import Sampling, generate
    from stretto.train.trained_model import load_model

    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
    trained = load_model(options.run, options.device, trust=options.trust)
    if options.count == 1:
        # As it comes: the first words are there before the last are drawn.
        sys.stdout.write(options.prompt)
        for (piece,) in generate(trained, options.prompt, options.length, sampling):
            sys.stdout.write(piece)
            sys.stdout.flush()
        sys.stdout.write("\n")
        return
    pieces = generate(trained, options.prompt, options.length, sampling, count=options.count)
    texts = ["".join(parts) for parts in zip(*pieces, strict=True)]
    sys.stdout.write("\n---\n".join(f"{options.prompt}{text}" for text in texts) + "\n")


def make_parser() -> Parser:
    """Return the command's parser."""
    parser = Parser(
        prog="stretto generate",
        description="Write text with a run's model: go on from a prompt, a token at a time.",
        epilog='example:\n  stretto generate runs/book --prompt "Once upon a time" --length 300 --temperature 0.8',
    )
    add_model_arguments(parser)
    parser.add_argument("--prompt", default="", metavar="TEXT", help="what to go on from (default: a new line)")
    parser.add_argument("--length", type=int, default=200, metavar="N", help="how many tokens to write (default: 200)")
    parser.add_argument(
        "--temperature", type=float, default=1.0, metavar="T",
        help="below 1 keeps to what is likely, above 1 dares more, 0 takes the likeliest (default: 1)",
    )  # fmt: skip
    parser.add_argument("--top-k", type=int, metavar="N", help="draw from the N likeliest tokens only")
    parser.add_argument("--top-p", type=float, metavar="P", help="draw from the fewest tokens that are so likely")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of what is drawn (default: 0)")
    parser.add_argument("--count", type=int, default=1, metavar="N", help="how many texts (default: 1)")
    return parser
