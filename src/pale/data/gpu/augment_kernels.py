"""Triton kernels that execute augmentation plans: resized crop, one operation per image, random erasing.

They compute the same as `augment`, which needs a dozen passes over memory and hundreds of launches. Images are uint8,
(b, 3, size, size). Kernels read the parameters from the tensors of the plan, so a batch takes about ten launches for
any draws. Nothing is specialised on a size.
"""

import triton
import triton.language as tl

from .plans import AMOUNTS as _AMOUNTS
from .plans import CODES, BatchPlan

HEAD = tl.constexpr(BatchPlan.HEAD)
BOX = tl.constexpr(BatchPlan.BOX)
AMOUNTS = tl.constexpr(_AMOUNTS)
AFFINE = tl.constexpr(CODES["affine"])
SHARPNESS = tl.constexpr(CODES["sharpness"])
COLOUR = tl.constexpr(CODES["colour"])
# From here on the operations are look-up tables of the grey levels of a channel.
BRIGHTNESS = tl.constexpr(CODES["brightness"])
CONTRAST = tl.constexpr(CODES["contrast"])
INVERT = tl.constexpr(CODES["invert"])
POSTERIZE = tl.constexpr(CODES["posterize"])
SOLARIZE = tl.constexpr(CODES["solarize"])
SOLARIZE_ADD = tl.constexpr(CODES["solarize_add"])
AUTO_CONTRAST = tl.constexpr(CODES["auto_contrast"])
EQUALIZE = tl.constexpr(CODES["equalize"])


@triton.jit
def filter_support(i, length, size, cubic, flip):
    """Return centre, width, first and last input pixel, and number of taps of the filter for output pixels `i`."""
    i = tl.where(flip > 0, size - 1 - i, i)
    scale = length.to(tl.float64) / size
    stretch = tl.maximum(scale, 1.0)
    support = stretch * (1 + cubic)
    centre = scale * (i + 0.5)
    first = tl.maximum((centre - support + 0.5).to(tl.int64), 0)
    last = tl.minimum((centre + support + 0.5).to(tl.int64), length)
    return centre, stretch, first, last, (2 * support).to(tl.int32) + 2


@triton.jit
def filter_weight(j, centre, stretch, last, cubic):
    """Return the weight of input pixels `j`, a cubic or a triangle around each centre."""
    d = tl.abs((j + 0.5 - centre) / stretch)
    near = (1.5 * d - 2.5) * d * d + 1
    far = (((d - 5) * d + 8) * d - 4) * -0.5
    curve = tl.where(d < 1, near, tl.where(d < 2, far, 0.0))
    w = tl.where(cubic > 0, curve, tl.maximum(1 - d, 0.0))
    return tl.where(j < last, w, 0.0).to(tl.float32)


@triton.jit
def to_grey_level(x):
    """Clip to 0 to 255 and truncate fractions."""
    return tl.minimum(tl.maximum(x, 0.0), 255.0).to(tl.int32).to(tl.uint8)


@triton.jit(do_not_specialize=["total", "high", "size"])
def crop_rows(
    p_flat,
    p_starts,
    p_widths,
    p_ints,
    p_out,
    total,
    high,
    size,
    BLOCK_Y: tl.constexpr,
    BLOCK_X: tl.constexpr,
):
    """Resize each crop along its rows: (b, 3, high, size), of which an image uses as many rows as its crop has."""
    image = tl.program_id(0).to(tl.int64)
    p_head = p_ints + image * HEAD
    sample, y, x = tl.load(p_head), tl.load(p_head + 1), tl.load(p_head + 2)
    h, w = tl.load(p_head + 3), tl.load(p_head + 4)
    flip, cubic = tl.load(p_head + 5), tl.load(p_head + 7)
    start, width = tl.load(p_starts + sample), tl.load(p_widths + sample)
    o_y = tl.program_id(1) * BLOCK_Y + tl.arange(0, BLOCK_Y)
    o_x = tl.program_id(2) * BLOCK_X + tl.arange(0, BLOCK_X)
    if tl.program_id(1) * BLOCK_Y < h:
        centre, stretch, first, last, taps = filter_support(o_x, w, size, cubic, flip)
        p_row = p_flat + start + (y + o_y)[:, None] * width + x
        plane = tl.cast(total, tl.int64)
        b_r = tl.zeros([BLOCK_Y, BLOCK_X], tl.float32)
        b_g = tl.zeros([BLOCK_Y, BLOCK_X], tl.float32)
        b_b = tl.zeros([BLOCK_Y, BLOCK_X], tl.float32)
        total_weight = tl.zeros([BLOCK_X], tl.float32)
        for t in range(taps):
            j = first + t
            weight = filter_weight(j, centre, stretch, last, cubic)
            total_weight += weight
            mask = (o_y < h)[:, None] & ((j < last) & (o_x < size))[None, :]
            p_in = p_row + j[None, :]
            b_r += weight[None, :] * tl.load(p_in, mask=mask, other=0).to(tl.float32)
            b_g += weight[None, :] * tl.load(p_in + plane, mask=mask, other=0).to(tl.float32)
            b_b += weight[None, :] * tl.load(p_in + 2 * plane, mask=mask, other=0).to(tl.float32)
        mask = (o_y < h)[:, None] & (o_x < size)[None, :]
        p = p_out + (image * 3 * high + o_y[:, None]) * size + o_x[None, :]
        tl.store(p, to_grey_level(b_r / total_weight[None, :] + 0.5), mask=mask)
        tl.store(p + high * size, to_grey_level(b_g / total_weight[None, :] + 0.5), mask=mask)
        tl.store(p + 2 * high * size, to_grey_level(b_b / total_weight[None, :] + 0.5), mask=mask)


@triton.jit(do_not_specialize=["high", "size"])
def crop_columns(p_rows, p_ints, p_out, high, size, BLOCK_Y: tl.constexpr, BLOCK_X: tl.constexpr):
    """Resize the result of `crop_rows` along its columns."""
    plane = tl.program_id(0).to(tl.int64)  # image and channel
    p_head = p_ints + plane // 3 * HEAD
    h, flip, cubic = tl.load(p_head + 3), tl.load(p_head + 6), tl.load(p_head + 7)
    o_y = tl.program_id(1) * BLOCK_Y + tl.arange(0, BLOCK_Y)
    o_x = tl.program_id(2) * BLOCK_X + tl.arange(0, BLOCK_X)
    centre, stretch, first, last, taps = filter_support(o_y, h, size, cubic, flip)
    b_out = tl.zeros([BLOCK_Y, BLOCK_X], tl.float32)
    total_weight = tl.zeros([BLOCK_Y], tl.float32)
    for t in range(taps):
        i = first + t
        weight = filter_weight(i, centre, stretch, last, cubic)
        total_weight += weight
        mask = ((i < last) & (o_y < size))[:, None] & (o_x < size)[None, :]
        p = p_rows + (plane * high + i)[:, None] * size + o_x[None, :]
        b_out += weight[:, None] * tl.load(p, mask=mask, other=0).to(tl.float32)
    mask = (o_y < size)[:, None] & (o_x < size)[None, :]
    p_out += (plane * size + o_y[:, None]) * size + o_x[None, :]
    tl.store(p_out, to_grey_level(b_out / total_weight[:, None] + 0.5), mask=mask)


@triton.jit
def luminance(r, g, b):
    """Convert to grey as Pillow does."""
    return (r * 19595 + g * 38470 + b * 7471 + 0x8000) >> 16


@triton.jit(do_not_specialize=["codes", "amounts", "pixels"])
def look_up_tables(
    p_images, p_ints, p_floats, p_tables, codes, amounts, pixels, BLOCK: tl.constexpr
):
    """Compute the table (b, 3, 256) of operations that replace the grey levels of a channel."""
    plane = tl.program_id(0).to(tl.int64)
    image = plane // 3
    code = tl.load(p_ints + codes + image)
    if code >= BRIGHTNESS:
        amount = tl.load(p_floats + amounts + image * AMOUNTS)
        factor = amount.to(tl.float32)
        p_plane = p_images + plane * pixels
        level = tl.arange(0, 256)
        grey = level.to(tl.float32)
        table = grey
        if code == BRIGHTNESS:
            table = factor * grey
        elif code == CONTRAST:
            p_image = p_images + image * 3 * pixels
            total = tl.zeros([BLOCK], tl.int64)
            for k in range(0, pixels, BLOCK):
                o = k + tl.arange(0, BLOCK)
                mask = o < pixels
                r = tl.load(p_image + o, mask=mask, other=0).to(tl.int32)
                g = tl.load(p_image + pixels + o, mask=mask, other=0).to(tl.int32)
                b = tl.load(p_image + 2 * pixels + o, mask=mask, other=0).to(tl.int32)
                total += luminance(r, g, b)
            mean = tl.sum(total, 0).to(tl.float64) / pixels
            ground = tl.floor(mean + 0.5).to(tl.float32)
            table = ground + factor * (grey - ground)
        elif code == INVERT:
            table = 255 - grey
        elif code == POSTERIZE:
            step = tl.exp2(8 - tl.minimum(factor, 8.0))
            table = tl.floor(grey / step) * step
        elif code == SOLARIZE:
            table = tl.where(grey < factor, grey, 255 - grey)
        elif code == SOLARIZE_ADD:
            table = tl.where(grey < 128, grey + factor, grey)
        else:  # operations on the histogram
            count = tl.zeros([256], tl.int32)
            for k in range(0, pixels, BLOCK):
                o = k + tl.arange(0, BLOCK)
                v = tl.load(p_plane + o, mask=o < pixels, other=0).to(tl.int32)
                count += tl.histogram(v, 256)
            masked = tl.cdiv(pixels, BLOCK) * BLOCK - pixels  # loaded as 0
            count -= tl.where(level == 0, masked, 0)
            last = tl.max(tl.where(count > 0, level, 0), 0)
            if code == AUTO_CONTRAST:
                low = tl.min(tl.where(count > 0, level, 255), 0)
                scale = 255.0 / tl.maximum(last - low, 1).to(tl.float64)
                stretched = tl.floor(level * scale - low * scale).to(tl.float32)
                table = tl.where(last > low, stretched, grey)
            else:
                step = (pixels - tl.sum(tl.where(level == last, count, 0), 0)) // 255
                before = tl.cumsum(count, 0) - count + step // 2
                table = tl.where(step > 0, (before // tl.maximum(step, 1)).to(tl.float32), grey)
        tl.store(p_tables + plane * 256 + level, to_grey_level(table))


@triton.jit
def tap(d, cubic, NUMBER: tl.constexpr):
    """Return the weight of one of the four pixels around points `d` after the second."""
    if NUMBER == 0:
        w = tl.where(cubic > 0, d * (-1 + d * (2 - d)), 0.0)
    elif NUMBER == 1:
        w = tl.where(cubic > 0, 1 + d * d * (d - 2), 1 - d)
    elif NUMBER == 2:
        w = tl.where(cubic > 0, d * (1 + d * (1 - d)), d)
    else:
        w = tl.where(cubic > 0, d * d * (d - 1), 0.0)
    return w


@triton.jit(do_not_specialize=["codes", "amounts", "size"])
def operate(p_images, p_tables, p_ints, p_floats, p_out, codes, amounts, size, BLOCK: tl.constexpr):
    """Apply one operation to each image, or copy it if it has none in this turn."""
    image = tl.program_id(0).to(tl.int64)
    code = tl.load(p_ints + codes + image)
    p_amounts = p_floats + amounts + image * AMOUNTS
    pixels = size * size
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = o < pixels
    p_images += image * 3 * pixels
    r = tl.load(p_images + o, mask=mask, other=0)
    g = tl.load(p_images + pixels + o, mask=mask, other=0)
    b = tl.load(p_images + 2 * pixels + o, mask=mask, other=0)
    if code >= BRIGHTNESS:
        p_table = p_tables + image * 768
        r = tl.load(p_table + r.to(tl.int32))
        g = tl.load(p_table + 256 + g.to(tl.int32))
        b = tl.load(p_table + 512 + b.to(tl.int32))
    elif code == COLOUR:
        factor = tl.load(p_amounts).to(tl.float32)
        ground = luminance(r.to(tl.int32), g.to(tl.int32), b.to(tl.int32)).to(tl.float32)
        r = to_grey_level(ground + factor * (r.to(tl.float32) - ground))
        g = to_grey_level(ground + factor * (g.to(tl.float32) - ground))
        b = to_grey_level(ground + factor * (b.to(tl.float32) - ground))
    elif code == SHARPNESS:
        factor = tl.load(p_amounts).to(tl.float32)
        y, x = o // size, o % size
        inner = (y > 0) & (y < size - 1) & (x > 0) & (x < size - 1)
        sum_r = 4 * r.to(tl.int32)
        sum_g = 4 * g.to(tl.int32)
        sum_b = 4 * b.to(tl.int32)
        for k in range(9):
            p = p_images + o + (k // 3 - 1) * size + k % 3 - 1
            sum_r += tl.load(p, mask=mask & inner, other=0).to(tl.int32)
            sum_g += tl.load(p + pixels, mask=mask & inner, other=0).to(tl.int32)
            sum_b += tl.load(p + 2 * pixels, mask=mask & inner, other=0).to(tl.int32)
        smooth = tl.floor(sum_r.to(tl.float32) / 13 + 0.5)
        r = tl.where(inner, to_grey_level(smooth + factor * (r.to(tl.float32) - smooth)), r)
        smooth = tl.floor(sum_g.to(tl.float32) / 13 + 0.5)
        g = tl.where(inner, to_grey_level(smooth + factor * (g.to(tl.float32) - smooth)), g)
        smooth = tl.floor(sum_b.to(tl.float32) / 13 + 0.5)
        b = tl.where(inner, to_grey_level(smooth + factor * (b.to(tl.float32) - smooth)), b)
    elif code == AFFINE:
        cubic = tl.load(p_amounts + 6)
        # The matrix is for coordinates from 0 to 1.
        x = (o % size + 0.5).to(tl.float64) / size
        y = (o // size + 0.5).to(tl.float64) / size
        from_x = tl.load(p_amounts) * x + tl.load(p_amounts + 1) * y + tl.load(p_amounts + 2)
        from_y = tl.load(p_amounts + 3) * x + tl.load(p_amounts + 4) * y + tl.load(p_amounts + 5)
        from_x, from_y = from_x * size, from_y * size
        outside = (from_x < 0) | (from_x >= size) | (from_y < 0) | (from_y >= size)
        left, top = tl.floor(from_x - 0.5), tl.floor(from_y - 0.5)
        dx, dy = (from_x - 0.5 - left).to(tl.float32), (from_y - 0.5 - top).to(tl.float32)
        # Points outside are not read, and may exceed int32.
        left = tl.where(outside, 0.0, left).to(tl.int32)
        top = tl.where(outside, 0.0, top).to(tl.int32)
        sum_r = tl.zeros([BLOCK], tl.float32)
        sum_g = tl.zeros([BLOCK], tl.float32)
        sum_b = tl.zeros([BLOCK], tl.float32)
        for i in tl.static_range(4):
            row = tl.minimum(tl.maximum(top + (i - 1), 0), size - 1) * size
            for j in tl.static_range(4):
                w = tap(dy, cubic, i) * tap(dx, cubic, j)
                p = p_images + row + tl.minimum(tl.maximum(left + (j - 1), 0), size - 1)
                sum_r += w * tl.load(p, mask=mask & ~outside, other=0).to(tl.float32)
                sum_g += w * tl.load(p + pixels, mask=mask & ~outside, other=0).to(tl.float32)
                sum_b += w * tl.load(p + 2 * pixels, mask=mask & ~outside, other=0).to(tl.float32)
        # The weights sum to slightly less than one; the offset keeps 255 from becoming 254.
        fill = tl.load(p_amounts + 7).to(tl.float32)
        r = to_grey_level(tl.where(outside, fill, sum_r + 1e-3))
        fill = tl.load(p_amounts + 8).to(tl.float32)
        g = to_grey_level(tl.where(outside, fill, sum_g + 1e-3))
        fill = tl.load(p_amounts + 9).to(tl.float32)
        b = to_grey_level(tl.where(outside, fill, sum_b + 1e-3))
    p_out += image * 3 * pixels
    tl.store(p_out + o, r, mask=mask)
    tl.store(p_out + pixels + o, g, mask=mask)
    tl.store(p_out + 2 * pixels + o, b, mask=mask)


@triton.jit
def shift_right(z, BITS: tl.constexpr):
    """Shift to the right and fill with zeros."""
    return (z >> BITS) & ((1 << (64 - BITS)) - 1)


@triton.jit(do_not_specialize=["boxes", "size"])
def erase(p_images, p_ints, p_mean, p_std, boxes, size, BLOCK: tl.constexpr):
    """Fill boxes with noise in place; as in `augment.normal`, it depends only on key and pixel."""
    p_box = p_ints + boxes + tl.program_id(0) * BOX
    image, y, x = tl.load(p_box), tl.load(p_box + 1), tl.load(p_box + 2)
    h, w, key = tl.load(p_box + 3), tl.load(p_box + 4), tl.load(p_box + 5)
    pixels = size * size
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    i, j = o // size % size, o % size
    inside = (o < 3 * pixels) & (i >= y) & (i < y + h) & (j >= x) & (j < x + w)
    z = key + (o + 1).to(tl.int64) * -7046029254386353131
    z = (z ^ shift_right(z, 30)) * -4658895280553007687  # splitmix64
    z = (z ^ shift_right(z, 27)) * -7723592293110705685
    z = z ^ shift_right(z, 31)
    u = ((z & 0xFFFFFF) + 1).to(tl.float32) * (1 / 2**24)  # in (0, 1]
    angle = shift_right(z, 32).to(tl.float32) * 1.4629180792671596e-09  # 2 pi / 2**32
    noise = tl.sqrt(-2 * tl.log(u)) * tl.cos(angle)
    channel = o // pixels
    mean = tl.load(p_mean + channel, mask=inside, other=0.0)
    std = tl.load(p_std + channel, mask=inside, other=0.0)
    grey = to_grey_level((noise * std + mean) * 255 + 0.5)
    tl.store(p_images + image * 3 * pixels + o, grey, mask=inside)
