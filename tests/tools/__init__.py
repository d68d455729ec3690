"""Tools that judge the tests; they are no tests and no part of the product."""
