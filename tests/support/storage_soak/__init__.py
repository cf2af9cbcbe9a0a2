"""Stories of a storage URL to which everything happens: `story` draws them, and tells them.

`places` are where it is, `damages` what is done to its files, `lies` what it answers; `world` says what must hold.
"""
