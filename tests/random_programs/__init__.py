"""A differential test of the whole runtime: random programs, of which every result is known from the seed.

program.py    what all ranks do, drawn from a seed
values.py     what goes in and must come out
memory.py     where buffers lie: odd, strided, registered, with guards around them
calls.py      one collective of a program, through the native API or torch.distributed
strand.py     a thread of a rank: issues, waits, compares
run.py        the processes of a program, its fault, its time limit
search.py     seeds in turn, and the shrinking of one that fails

python tests/random_programs 17 --fault kill     one program; see --help
"""
