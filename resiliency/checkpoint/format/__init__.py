# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint is on storage: names, manifest, marker, lease, and the formats with their readers."""
