"""What an exported folder brings for `transformers`, beside the network of `q0lib.model`.

`export` copies these files; they run where q0lib is not installed, and nothing in q0lib needs them.
"""
