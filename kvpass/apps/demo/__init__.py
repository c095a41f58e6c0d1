"""The main job: what each policy costs and keeps on real text, as tables and pictures.

Needs the `demo` extra; nothing else in kvpass imports this package.
"""
