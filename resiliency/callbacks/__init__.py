# SPDX-License-Identifier: Apache-2.0
"""Lightning and NeMo callbacks; import the module you need."""
