"""Statements of the grammar that not every supported Python has."""

import ast
import sys
from typing import TypeAlias

if sys.version_info >= (3, 11):
    TryStatement: TypeAlias = ast.Try | ast.TryStar
    TRY_STATEMENTS: tuple[type[ast.stmt], ...] = (ast.Try, ast.TryStar)
else:
    TryStatement: TypeAlias = ast.Try
    TRY_STATEMENTS = (ast.Try,)
