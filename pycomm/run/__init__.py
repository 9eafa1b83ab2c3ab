"""python -m pycomm.run: starts the ranks of a script on this host, and replaces those that die, one by one
(docs/recovery.md).

    __main__.py   the command line
    job.py        the ranks: started, watched, replaced, ended
    output.py     what they print, line by line under their names
    rank.py       what a rank's process runs before the script
"""
