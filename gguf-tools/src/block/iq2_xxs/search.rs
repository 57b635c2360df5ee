//! The search for the codes and scales of one super-block that minimise its weighted squared error.
//!
//! For eight values `x` with weights `w`, a codebook entry of magnitudes `g` and a scale `s`, the error is
//! `sum w x^2 - 2 s P + s^2 Q` with `P = sum w |x| g` and `Q = sum w g^2`. The parity rule costs
//! `2 min(w |x| g)` in `P` where the number of negatives is odd: the cheapest sign is the wrong one.
//! Neither depends on the scale, and both are sums (the cost of parity a minimum) over the two halves of an
//! entry, of which there are few. The eight lanes are the eight sub-blocks of 32 values, so that every
//! sub-block is looked at under its own scale and sums over a sub-block need no exchange between lanes.

use std::array::from_fn;

use half::f16;

use super::super::codebook::{self, Codebook};
use super::super::grids;
use crate::simd::{Lanes, to_array};

/// Values in one super-block.
pub(super) const BLOCK_VALUES: usize = codebook::BLOCK_VALUES;
/// Sub-blocks, each with a scale of its own: the lanes.
const SUB_BLOCKS: usize = 8;
/// Values in a sub-block.
const SUB_BLOCK_VALUES: usize = 32;
/// Eights of values in one sub-block, each with an entry of its own.
const EIGHTS: usize = 4;
/// The magnitudes behind the codes 0, 1 and 2.
pub(crate) const MAGNITUDES: [f32; 3] = [8.0, 25.0, 43.0];
/// One number for each sub-block.
type PerSubBlock = [f32; SUB_BLOCKS];

/// Different first and second halves among the entries of the codebook.
pub(crate) const N_LOW: usize = distinct(0).1;
const N_HIGH: usize = distinct(8).1;
pub(crate) const N_HALVES: usize = N_LOW + N_HIGH;
/// The packed codes of every half, first halves first.
pub(crate) static HALVES: [u8; N_HALVES] = halves();
/// Every entry as the places of its two halves in [`HALVES`].
pub(crate) static ENTRIES: [Entry; 256] = entries();

#[derive(Debug, Clone, Copy)]
pub(crate) struct Entry {
    pub(crate) low: u8,
    pub(crate) high: u8,
    pub(crate) number: f32,
}

/// For each byte that occurs at bit `shift` of an entry its place among them, and their count.
const fn distinct(shift: u32) -> ([u8; 256], usize) {
    let mut place = [u8::MAX; 256];
    let mut count = 0;
    let mut i = 0;
    while i < 256 {
        let half = ((grids::IQ2_XXS[i] >> shift) & 255) as usize;
        if place[half] == u8::MAX {
            place[half] = count as u8;
            count += 1;
        }
        i += 1;
    }
    (place, count)
}

const fn halves() -> [u8; N_HALVES] {
    let (low, high) = (distinct(0).0, distinct(8).0);
    let mut halves = [0; N_HALVES];
    let mut i = 0;
    while i < 256 {
        let entry = grids::IQ2_XXS[i];
        halves[low[(entry & 255) as usize] as usize] = (entry & 255) as u8;
        halves[N_LOW + high[(entry >> 8) as usize] as usize] = (entry >> 8) as u8;
        i += 1;
    }
    halves
}

const fn entries() -> [Entry; 256] {
    let (low, high) = (distinct(0).0, distinct(8).0);
    let mut entries = [Entry { low: 0, high: 0, number: 0.0 }; 256];
    let mut i = 0;
    while i < 256 {
        let entry = grids::IQ2_XXS[i];
        entries[i] = Entry {
            low: low[(entry & 255) as usize],
            high: N_LOW as u8 + high[(entry >> 8) as usize],
            number: i as f32,
        };
        i += 1;
    }
    entries
}

/// `P`, `Q` and the cost of parity of one half of an entry, for eight eights at once.
#[derive(Debug, Clone, Copy)]
struct Half {
    p: PerSubBlock,
    q: PerSubBlock,
    parity: PerSubBlock,
}

const NO_HALF: Half = Half { p: [0.0; 8], q: [0.0; 8], parity: [0.0; 8] };

/// The table of halves. Longer than the `N_HALVES` in use, so that no index needs a check.
type Halves = [Half; 256];

/// Room for the intermediate results of one super-block; reused, since clearing it costs time.
pub(super) struct Workspace {
    /// `w |x|` in the order of the values.
    weighted: [f32; BLOCK_VALUES],
    /// Sign bits of every eight, `[sub-block][eight]`.
    negative: [[u8; EIGHTS]; SUB_BLOCKS],
    /// Magnitudes and weights, lanes across sub-blocks.
    magnitudes: [PerSubBlock; SUB_BLOCK_VALUES],
    weights: [PerSubBlock; SUB_BLOCK_VALUES],
    halves: Box<Halves>,
}

impl Workspace {
    pub(super) fn new() -> Self {
        Self {
            weighted: [0.0; BLOCK_VALUES],
            negative: [[0; EIGHTS]; SUB_BLOCKS],
            magnitudes: [[0.0; SUB_BLOCKS]; SUB_BLOCK_VALUES],
            weights: [[0.0; SUB_BLOCKS]; SUB_BLOCK_VALUES],
            halves: vec![NO_HALF; 256].into_boxed_slice().try_into().expect("as long as its type says"),
        }
    }
}

/// What the search found, in units of the values given.
#[derive(Debug, Clone, Copy)]
pub(super) struct Found {
    /// The super-block's scale, not yet rounded or multiplied by a gain.
    pub d: f32,
    /// `sum w q x / sum w x^2` with `q` the quantized values: what is left of the weights' size. Under 1, since
    /// the least error is found where the quantized values are too small.
    pub alignment: f32,
    /// Scale index of each sub-block.
    pub scale_indices: [u32; SUB_BLOCKS],
    /// Entry numbers of each sub-block.
    pub entries: [[u8; EIGHTS]; SUB_BLOCKS],
    /// Sign indices of each sub-block.
    pub signs: [[u8; EIGHTS]; SUB_BLOCKS],
}

/// Magnitudes, signs and weights from the order of the values into the lanes.
#[inline(always)]
fn spread_over_lanes<L: Lanes>(
    values: &[f32; BLOCK_VALUES],
    weights: &[f32; BLOCK_VALUES],
    work: &mut Workspace,
) {
    let zero = L::splat(0.0);
    for eight in 0..EIGHTS {
        let mut rows = ([zero; 8], [zero; 8]);
        for sub_block in 0..SUB_BLOCKS {
            let at = SUB_BLOCK_VALUES * sub_block + 8 * eight;
            let (x, w) = (L::load(&values[at..]), L::load(&weights[at..]));
            work.negative[sub_block][eight] = L::bits(x.less(zero)) as u8;
            rows.0[sub_block] = x.abs();
            rows.1[sub_block] = w;
            (x.abs() * w).store(&mut work.weighted[at..]);
        }
        let (x, w) = (L::transpose(rows.0), L::transpose(rows.1));
        for i in 0..8 {
            x[i].store(&mut work.magnitudes[8 * eight + i]);
            w[i].store(&mut work.weights[8 * eight + i]);
        }
    }
}

/// Fills the tables of halves of the eights number `eight`.
#[inline(always)]
fn tabulate<L: Lanes>(work: &mut Workspace, eight: usize) {
    let parity = L::load(&work.negative.map(|eights| (2 * (eights[eight].count_ones() & 1)) as f32));
    let zero = L::splat(0.0);
    // Of every code of a value: P, Q, cost of parity.
    let mut single = [[(zero, zero, zero); 3]; 8];
    for i in 0..8 {
        let weight = L::load(&work.weights[8 * eight + i]);
        let weighted = L::load(&work.magnitudes[8 * eight + i]) * weight;
        for (code, g) in MAGNITUDES.into_iter().enumerate() {
            let p = weighted * L::splat(g);
            single[i][code] = (p, weight * L::splat(g * g), p * parity);
        }
    }
    // Of every pair of codes, at `first + 4 * second`.
    let mut pairs = [[(zero, zero, zero); 16]; 4];
    for (pair, pairs) in pairs.iter_mut().enumerate() {
        for first in 0..3 {
            for second in 0..3 {
                let (a, b) = (single[2 * pair][first], single[2 * pair + 1][second]);
                pairs[first + 4 * second] = (a.0 + b.0, a.1 + b.1, a.2.min(b.2));
            }
        }
    }
    let (low, high) = work.halves[..N_HALVES].split_at_mut(N_LOW);
    join_pairs(&pairs[0], &pairs[1], &HALVES[..N_LOW], low);
    join_pairs(&pairs[2], &pairs[3], &HALVES[N_LOW..], high);
}

/// Halves from the sums of their first two and last two values.
#[inline(always)]
fn join_pairs<L: Lanes>(
    first: &[(L, L, L); 16],
    second: &[(L, L, L); 16],
    codes: &[u8],
    halves: &mut [Half],
) {
    for (half, codes) in halves.iter_mut().zip(codes) {
        let (a, b) = (&first[usize::from(codes & 15)], &second[usize::from(codes >> 4)]);
        (a.0 + b.0).store(&mut half.p);
        (a.1 + b.1).store(&mut half.q);
        a.2.min(b.2).store(&mut half.parity);
    }
}

/// The best entry of eight eights under each of several scales, given as half the scale: the entry that
/// maximises `P - half_scale * Q`. The numbers of the entries come as `f32`.
#[inline(always)]
fn best_entries<L: Lanes, const N: usize>(halves: &Halves, half_scales: &[L; N]) -> [L; N] {
    let mut best = [L::splat(f32::NEG_INFINITY); N];
    let mut chosen = [L::splat(0.0); N];
    for entry in &ENTRIES {
        let (low, high) = (&halves[usize::from(entry.low)], &halves[usize::from(entry.high)]);
        let parity = L::load(&low.parity).min(L::load(&high.parity));
        let p = L::load(&low.p) + L::load(&high.p) - parity;
        let q = L::load(&low.q) + L::load(&high.q);
        let number = L::splat(entry.number);
        for k in 0..N {
            let gain = p - half_scales[k] * q;
            let better = best[k].less(gain);
            best[k] = L::select(better, gain, best[k]);
            chosen[k] = L::select(better, number, chosen[k]);
        }
    }
    chosen
}

/// `P` and `Q` of chosen codes, summed over sub-blocks.
#[derive(Debug, Clone, Copy)]
struct Codes<L> {
    p: L,
    q: L,
}

impl<L: Lanes> Codes<L> {
    /// How much the error falls under a scale, from that of all zeros.
    #[inline(always)]
    fn gain(self, scale: L) -> L {
        scale * (self.p + self.p - scale * self.q)
    }

    #[inline(always)]
    fn select(mask: L::Mask, yes: Self, no: Self) -> Self {
        Self { p: L::select(mask, yes.p, no.p), q: L::select(mask, yes.q, no.q) }
    }

    #[inline(always)]
    fn plus(self, other: Self) -> Self {
        Self { p: self.p + other.p, q: self.q + other.q }
    }

    /// Those of one entry for each sub-block.
    #[inline(always)]
    fn of(halves: &Halves, entries: [f32; SUB_BLOCKS]) -> Self {
        let (mut p, mut q) = ([0.0; SUB_BLOCKS], [0.0; SUB_BLOCKS]);
        for lane in 0..SUB_BLOCKS {
            let entry = ENTRIES[entries[lane] as usize & 255];
            let (low, high) = (&halves[usize::from(entry.low)], &halves[usize::from(entry.high)]);
            let (a, b) = (low.parity[lane], high.parity[lane]);
            p[lane] = low.p[lane] + high.p[lane] - if a < b { a } else { b };
            q[lane] = low.q[lane] + high.q[lane];
        }
        Self { p: L::load(&p), q: L::load(&q) }
    }
}

/// Scales at which all entries are looked at first.
const N_SCALES: usize = 5;

/// Those scales as multiples of the weighted root mean square of a sub-block.
/// The best scale of a sub-block of Gaussian or FP4-valued weights lies between 0.03 and 0.07.
const FIRST_SCALES: [f32; N_SCALES] = [0.0307, 0.0384, 0.048, 0.06, 0.075];

/// Scales, as multiples of the same, for which the entries known from the first look will do: it comes to others
/// where outliers force a coarse `d` on everything else, or make a sub-block that is mostly one value.
const KNOWN_SCALES: std::ops::Range<f32> = 0.0246..0.094;

/// Weighted sum of squares of each sub-block, and its weighted root mean square.
#[inline(always)]
fn energy<L: Lanes>(work: &Workspace) -> (L, L) {
    let (mut energy, mut total) = (L::splat(0.0), L::splat(0.0));
    for (x, w) in work.magnitudes.iter().zip(&work.weights) {
        let (x, w) = (L::load(x), L::load(w));
        energy = energy + w * x * x;
        total = total + w;
    }
    (energy, (energy / total).sqrt())
}

/// What the first look at the entries found: for each eight of a sub-block and each scale the best entry.
#[derive(Debug, Clone, Copy)]
struct Known<L> {
    entries: [[L; N_SCALES]; EIGHTS],
    codes: [[Codes<L>; N_SCALES]; EIGHTS],
    /// Sums over the eights of a sub-block.
    sums: [Codes<L>; N_SCALES],
    /// The scale that would suit each sub-block best.
    best_scales: L,
}

/// Fills the tables and looks for the best entries under several scales.
#[inline(always)]
fn first_look<L: Lanes>(work: &mut Workspace, root_mean_square: L) -> Known<L> {
    let half_scales = FIRST_SCALES.map(|factor| root_mean_square * L::splat(0.5 * factor));
    let zero = L::splat(0.0);
    let none = Codes { p: zero, q: zero };
    let mut known = Known {
        entries: [[zero; N_SCALES]; EIGHTS],
        codes: [[none; N_SCALES]; EIGHTS],
        sums: [none; N_SCALES],
        best_scales: zero,
    };
    for eight in 0..EIGHTS {
        tabulate::<L>(work, eight);
        known.entries[eight] = best_entries(&work.halves, &half_scales);
        for k in 0..N_SCALES {
            let codes = Codes::of(&work.halves, to_array(known.entries[eight][k]));
            known.codes[eight][k] = codes;
            known.sums[k] = known.sums[k].plus(codes);
        }
    }
    let mut most = L::splat(-1.0);
    for codes in known.sums {
        let scale = codes.p / codes.q;
        let gain = scale * codes.p;
        let better = most.less(gain);
        most = L::select(better, gain, most);
        known.best_scales = L::select(better, scale, known.best_scales);
    }
    known
}

/// The best entries under one scale for each sub-block.
#[inline(always)]
fn second_look<L: Lanes>(work: &mut Workspace, scales: L) -> ([L; EIGHTS], Codes<L>) {
    let zero = L::splat(0.0);
    let (mut entries, mut codes) = ([zero; EIGHTS], Codes { p: zero, q: zero });
    for eight in 0..EIGHTS {
        tabulate::<L>(work, eight);
        [entries[eight]] = best_entries(&work.halves, &[scales * L::splat(0.5)]);
        codes = codes.plus(Codes::of(&work.halves, to_array(entries[eight])));
    }
    (entries, codes)
}

/// The scale index below the wanted scale and the one above, given `1 / (step of the scale index)`.
#[inline(always)]
fn indices_around<L: Lanes>(scales: L, per_step: f32) -> [L; 2] {
    let (zero, top) = (L::splat(0.0), L::splat(15.0));
    let below = (scales * L::splat(per_step) - L::splat(1.0)).round();
    let below = below.max(zero).min(top);
    [below, (below + L::splat(1.0)).min(top)]
}

/// The gains of the best codes known of each sub-block under one `d`, at the better of the scale indices around
/// the best scale.
#[inline(always)]
fn gains<L: Lanes>(d: f32, known: &Known<L>) -> L {
    let mut gains = L::splat(0.0);
    for indices in indices_around(known.best_scales, 4.0 / d) {
        let scales = L::splat(d * 0.25) * (indices + L::splat(0.5));
        for codes in known.sums {
            gains = codes.gain(scales).max(gains);
        }
    }
    gains
}

/// What each sub-block stores.
#[derive(Debug, Clone, Copy)]
struct Choice<L> {
    indices: L,
    entries: [L; EIGHTS],
    codes: Codes<L>,
}

impl<L: Lanes> Choice<L> {
    #[inline(always)]
    fn select(mask: L::Mask, yes: Self, no: Self) -> Self {
        let mut choice = Self {
            indices: L::select(mask, yes.indices, no.indices),
            entries: no.entries,
            codes: Codes::select(mask, yes.codes, no.codes),
        };
        for eight in 0..EIGHTS {
            choice.entries[eight] = L::select(mask, yes.entries[eight], no.entries[eight]);
        }
        choice
    }

    /// The best of the known entries of each eight under given scale indices, and the gains.
    #[inline(always)]
    fn at(d: f32, indices: L, known: &Known<L>) -> (Self, L) {
        let scales = L::splat(d * 0.25) * (indices + L::splat(0.5));
        let zero = L::splat(0.0);
        let mut choice = Self { indices, entries: [zero; EIGHTS], codes: Codes { p: zero, q: zero } };
        for eight in 0..EIGHTS {
            let (mut best, mut entries) = (known.codes[eight][0], known.entries[eight][0]);
            for k in 1..N_SCALES {
                let other = known.codes[eight][k];
                let better = best.gain(scales).less(other.gain(scales));
                best = Codes::select(better, other, best);
                entries = L::select(better, known.entries[eight][k], entries);
            }
            choice.entries[eight] = entries;
            choice.codes = choice.codes.plus(best);
        }
        (choice, choice.codes.gain(scales))
    }
}

/// The better of the scale indices around the best scales, and the entries that go with them.
#[inline(always)]
fn choose<L: Lanes>(d: f32, known: &Known<L>) -> Choice<L> {
    let [below, above] = indices_around(known.best_scales, 4.0 / d);
    let (below, gain_below) = Choice::at(d, below, known);
    let (above, gain_above) = Choice::at(d, above, known);
    Choice::select(gain_below.less(gain_above), above, below)
}

/// The best `d` for codes that are known under several scales; 0 if there is none.
///
/// Tries those that put the largest scale index somewhat above to half-way below the largest scale wanted.
/// Sub-blocks that want less than half of it get their turn as the largest, in case the larger ones matter little.
#[inline(always)]
fn search_d<L: Lanes>(known: &Known<L>) -> f32 {
    let scales = to_array(known.best_scales);
    let largest_below = |limit: f32| scales.into_iter().filter(|&s| s < limit).fold(0.0, f32::max);
    let (mut best_d, mut best_gain) = (0.0, 0.0);
    let mut top = largest_below(f32::INFINITY);
    while top > 0.0 {
        let mut d = top * 0.24;
        while d < top * 0.5 {
            let gain = gains(d, known).sum();
            if gain > best_gain {
                (best_d, best_gain) = (d, gain);
            }
            d *= 1.02;
        }
        top = largest_below(top * 0.5);
    }
    best_d
}

/// Codes and scales of one super-block.
///
/// `values`: of order one; `weights`: positive, of order one at most; `round_d`: the nearest `d` that can be
/// stored. `None`: all zero is best.
#[inline(always)]
pub(super) fn search<L: Lanes>(
    values: &[f32; BLOCK_VALUES],
    weights: &[f32; BLOCK_VALUES],
    work: &mut Workspace,
    round_d: impl Fn(f32) -> f32,
) -> Option<Found> {
    spread_over_lanes::<L>(values, weights, work);
    let (energy, root_mean_square) = energy::<L>(work);
    let known = first_look::<L>(work, root_mean_square);
    let d = round_d(search_d(&known));
    if d <= 0.0 {
        return None;
    }
    let Choice { indices, mut entries, mut codes } = choose(d, &known);
    let factors = (indices + L::splat(0.5)) * L::splat(0.25);
    let scales = factors * L::splat(d);
    let too_small = scales.less(root_mean_square * L::splat(KNOWN_SCALES.start));
    let too_large = (root_mean_square * L::splat(KNOWN_SCALES.end)).less(scales);
    if L::bits(too_small) | L::bits(too_large) != 0 {
        (entries, codes) = second_look(work, scales);
    }
    let entries = entries.map(to_array);
    let entries = from_fn(|sub_block| from_fn(|eight| entries[eight][sub_block] as u8));
    // The codes are settled; what is left is a parabola in d.
    let (p, q) = ((factors * codes.p).sum(), (factors * factors * codes.q).sum());
    let d = p / q;
    Some(Found {
        d,
        alignment: d * p / energy.sum(),
        scale_indices: indices.to_i32().map(|index| index as u32),
        signs: stored_signs::<L>(work, &entries),
        entries,
    })
}

/// The sign indices: where the number of negatives of an eight is odd, the sign that costs least is wrong.
#[inline(always)]
fn stored_signs<L: Lanes>(
    work: &Workspace,
    entries: &[[u8; EIGHTS]; SUB_BLOCKS],
) -> [[u8; EIGHTS]; SUB_BLOCKS] {
    let magnitudes = L::load(&super::Iq2Xxs::MAGNITUDES);
    let mut signs = work.negative;
    for (index, negative) in signs.as_flattened_mut().iter_mut().enumerate() {
        if negative.count_ones() % 2 == 1 {
            let entry = entries[index / EIGHTS][index % EIGHTS];
            let weighted = L::load(&work.weighted[8 * index..]);
            let costs = to_array(weighted * magnitudes.pick(super::CODES[entry as usize]));
            let mut cheapest = 0;
            for i in 1..8 {
                if costs[i] < costs[cheapest] {
                    cheapest = i;
                }
            }
            *negative ^= 1 << cheapest;
        }
        *negative &= 127;
    }
    signs
}

/// The half-precision number nearest to `value`, which is not negative; the largest finite one above that.
pub(super) fn to_f16(value: f32) -> f16 {
    f16::from_f32(value.min(f16::MAX.to_f32()))
}
