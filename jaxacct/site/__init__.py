"""The site: reference, tutorials, proofs and glossary of the repository in HTML: `python -m jaxacct.site --out FOLDER`.

The site is built from a checkout, and this package is no part of the installed one.
"""
