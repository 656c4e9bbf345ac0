"""The site: reference, tutorials, proofs and words of this repository as HTML; `python -m jaxacct.site --out FOLDER`.

It is built from a checkout, and is no part of the installed package.
"""
