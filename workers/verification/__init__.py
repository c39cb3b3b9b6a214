"""Pure arithmetic that decides which candidates are accepted. Logits in, a Verdict out.

Nothing here reads a clock or draws a random number: the noise is a function of the request's seed
and of the position. Begin with `verify.verify`; `rules.FACTS` says what each rule asks for, and
docs/rules.md shows it. Shapes in names: T rows of a chain, R rows of a tree (row n follows node n),
V vocabulary, N some of the vocabulary's tokens, M tokens of a draft distribution, P tokens of a
prefix, D depths.
"""
