# SPDX-License-Identifier: Apache-2.0
"""What operators see of the fleet: the status document, and its forms for people and for machines."""
