"""Terminals that `%import common` brings, by the library of the Lark toolkit (common.lark)."""

from collections.abc import Mapping
from types import MappingProxyType

DIGITS = "[0-9]+"
SIGN = r"[+\-]?"
EXPONENT = rf"[eE]{SIGN}{DIGITS}"
DECIMAL = rf"(?:{DIGITS}\.[0-9]*|\.{DIGITS})"
FLOAT = f"(?:{DECIMAL}(?:{EXPONENT})?|{DIGITS}{EXPONENT})"
NUMBER = f"(?:{DIGITS}|{FLOAT})"
COMMON: Mapping[str, str] = MappingProxyType(
    {
        "DIGIT": "[0-9]",
        "HEXDIGIT": "[0-9a-fA-F]",
        "INT": DIGITS,
        "SIGNED_INT": SIGN + DIGITS,
        "DECIMAL": DECIMAL,
        "_EXP": EXPONENT,
        "FLOAT": FLOAT,
        "SIGNED_FLOAT": SIGN + FLOAT,
        "NUMBER": NUMBER,
        "SIGNED_NUMBER": SIGN + NUMBER,
        "ESCAPED_STRING": r'"(?:[^"\\]|\\.)*"',
        "LCASE_LETTER": "[a-z]",
        "UCASE_LETTER": "[A-Z]",
        "LETTER": "[a-zA-Z]",
        "WORD": "[a-zA-Z]+",
        "CNAME": "[a-zA-Z_][a-zA-Z0-9_]*",
        "WS_INLINE": r"[ \t]+",
        "WS": r"[ \t\f\r\n]+",
        "CR": r"\r",
        "LF": r"\n",
        "NEWLINE": r"(?:\r?\n)+",
        "SH_COMMENT": r"\#[^\n]*",
        "CPP_COMMENT": r"\/\/[^\n]*",
        "C_COMMENT": r"\/\*[^*]*\*+(?:[^\/*][^*]*\*+)*\/",
        "SQL_COMMENT": r"--[^\n]*",
    }
)
