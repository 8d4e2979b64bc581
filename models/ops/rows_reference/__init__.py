"""Rows in plain torch, and compositions of other ops: for CPUs, and for what no kernel of a GPU takes."""

from models.ops.rows_reference import attention, dense, experts, recurrent

ROWS = (*dense.ROWS, *attention.ROWS, *experts.ROWS, *recurrent.ROWS)
