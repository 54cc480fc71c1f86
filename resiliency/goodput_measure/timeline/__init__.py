# SPDX-License-Identifier: Apache-2.0
"""A ledger as a picture or a page: what each rank did, second by second."""
