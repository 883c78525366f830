"""Use the attention operator in your own block: `pale.ops.pale_attention` on maps of any height and width.

python examples/attention_block.py
"""

import torch
import torch.nn.functional as F
from torch import nn

from pale.ops import pale_attention


class Block(nn.Module):
    """A transformer block with pale attention on channels-last maps, (b, h, w, c)."""

    def __init__(self, c, heads, pale_size):
        super().__init__()
        self.heads, self.pale_size = heads, pale_size  # heads must be even: rows and columns
        self.norm1, self.norm2 = nn.LayerNorm(c), nn.LayerNorm(c)
        self.position = nn.Conv2d(c, c, 3, padding=1, groups=c)  # attention has no order of its own
        self.qkv, self.project = nn.Linear(c, 3 * c), nn.Linear(c, c)
        self.mlp = nn.Sequential(nn.Linear(c, 4 * c), nn.GELU(), nn.Linear(4 * c, c))

    def forward(self, x):
        """(b, h, w, c) -> (b, h, w, c)."""
        b, h, w, c = x.shape
        x = x + self.position(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        qkv = self.qkv(self.norm1(x)).view(b, h, w, 3, self.heads, c // self.heads)
        q, k, v = qkv.unbind(3)  # (b, h, w, heads, d) each
        y = pale_attention(q, k, v, pale_size=(self.pale_size, self.pale_size))
        x = x + self.project(y.reshape(b, h, w, c))
        return x + self.mlp(self.norm2(x))


def main():
    """Run a block forward and backward; compare a large pale with global attention."""
    torch.manual_seed(0)
    block = Block(c=64, heads=4, pale_size=7)
    x = torch.randn(2, 23, 37, 64, requires_grad=True)  # sizes need not divide
    y = block(x)
    y.square().mean().backward()
    print(f"{tuple(x.shape)} -> {tuple(y.shape)}, gradient norm {x.grad.norm():.4f}")

    # With a pale as large as the map every token attends to all tokens.
    q, k, v = torch.randn(3, 1, 8, 10, 4, 16).unbind(0)
    pale = pale_attention(q, k, v, pale_size=(8, 10))
    flat = (t.flatten(1, 2).transpose(1, 2) for t in (q, k, v))  # (b, heads, h * w, d)
    whole = F.scaled_dot_product_attention(*flat).transpose(1, 2).view_as(pale)
    difference = (pale - whole).abs().max().item()
    print(f"largest difference from global attention {difference:.1e}")
    return y, difference


if __name__ == "__main__":
    main()
