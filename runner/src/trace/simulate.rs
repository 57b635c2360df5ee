//! What caches of experts would make of a recorded sequence.
//!
//! A cache holds some experts of all layers. The experts that a layer uses are looked up together: those that are there
//! are hits, the others are fetched. A fetched expert that is not kept was computed from a staging buffer.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use gguf_tools::plot::{LineChart, PlotError, Scale, Series};
use serde::Serialize;

use super::{Phase, Trace, TraceError, Visit};

/// Which expert makes room for another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Policy {
    /// The one that was not used for the longest time; what is fetched is always kept.
    LeastRecentlyUsed,
    /// The one used least often, older uses counting less: scores of a layer are halved every so many of its visits,
    /// ties go to the least recently used. What is fetched is kept if its score is above the victim's. No layer falls
    /// below as many slots as it uses at once, as far as there are enough.
    DecayedFrequency {
        /// Visits of a layer after which its scores are halved.
        half_life: u32,
    },
    /// The one that is needed again last, which takes the future: no cache has more hits.
    Oracle,
}

impl Policy {
    /// The name shown in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::LeastRecentlyUsed => "LRU",
            Self::DecayedFrequency { .. } => "decayed frequency",
            Self::Oracle => "oracle (Belady)",
        }
    }
}

/// Which visits count; the others only fill the cache.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counted {
    /// Positions below this one do not.
    pub from_position: usize,
    /// Only generated tokens do.
    pub decode_only: bool,
}

impl Counted {
    fn counts(self, visit: &Visit) -> bool {
        visit.position >= self.from_position && (!self.decode_only || visit.phase == Phase::Decode)
    }
}

/// What one cache made of a sequence.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Outcome {
    /// Its policy.
    pub policy: Policy,
    /// [`Policy::name`].
    pub name: &'static str,
    /// Experts it holds.
    pub slots: usize,
    /// Experts that were there.
    pub hits: u64,
    /// Experts that were fetched.
    pub misses: u64,
    /// `hits / (hits + misses)`; 0 if nothing counted.
    pub hit_rate: f64,
}

/// An expert: layer times experts plus number.
type Key = usize;

/// A cache under simulation. The experts of a visit are used one after the other, those that are there first.
trait Cache {
    /// A visit of `layer` begins, which uses `keys`.
    fn begin(&mut self, layer: usize, keys: &[Key]);
    fn holds(&self, key: Key) -> bool;
    /// Uses an expert that is there.
    fn hit(&mut self, key: Key);
    /// Fetches an expert that is not.
    fn miss(&mut self, key: Key);
}

/// Replays a sequence against a cache of `slots` experts.
///
/// # Errors
/// If the slots are fewer than what one layer uses at once.
pub fn replay(trace: &Trace, policy: Policy, slots: usize, counted: Counted) -> Result<Outcome, TraceError> {
    if slots < trace.n_used {
        return Err(TraceError::TooFewSlots { slots, n_used: trace.n_used });
    }
    let mut cache: Box<dyn Cache> = match policy {
        Policy::LeastRecentlyUsed => Box::new(Lru { slots, ..Lru::default() }),
        Policy::DecayedFrequency { half_life } => Box::new(Frequency::new(trace, slots, half_life.max(1))),
        Policy::Oracle => Box::new(Oracle::new(trace, slots)),
    };
    let (mut hits, mut misses) = (0, 0);
    for visit in &trace.visits {
        let keys = keys(trace, visit);
        cache.begin(visit.layer, &keys);
        let (there, fetched): (Vec<_>, Vec<_>) = keys.iter().partition(|&&key| cache.holds(key));
        for &key in &there {
            cache.hit(key);
        }
        for &key in &fetched {
            cache.miss(key);
        }
        if counted.counts(visit) {
            hits += there.len() as u64;
            misses += fetched.len() as u64;
        }
    }
    let hit_rate = hits as f64 / (hits + misses).max(1) as f64;
    Ok(Outcome { policy, name: policy.name(), slots, hits, misses, hit_rate })
}

fn keys(trace: &Trace, visit: &Visit) -> Vec<Key> {
    visit.ids.iter().map(|&id| visit.layer * trace.n_experts + id as usize).collect()
}

#[derive(Default)]
struct Lru {
    slots: usize,
    clock: u64,
    used_at: HashMap<Key, u64>,
    by_age: BTreeMap<u64, Key>,
}

impl Cache for Lru {
    fn begin(&mut self, _: usize, _: &[Key]) {}

    fn holds(&self, key: Key) -> bool {
        self.used_at.contains_key(&key)
    }

    fn hit(&mut self, key: Key) {
        self.clock += 1;
        if let Some(before) = self.used_at.insert(key, self.clock) {
            self.by_age.remove(&before);
        }
        self.by_age.insert(self.clock, key);
    }

    fn miss(&mut self, key: Key) {
        if self.used_at.len() == self.slots
            && let Some((_, oldest)) = self.by_age.pop_first()
        {
            self.used_at.remove(&oldest);
        }
        self.hit(key);
    }
}

struct Frequency {
    slots: usize,
    n_experts: usize,
    half_life: u32,
    floor: usize,
    /// Of every expert, there or not.
    scores: Vec<f64>,
    used_at: Vec<u64>,
    clock: u64,
    visits: Vec<u32>,
    held: Vec<Key>,
    is_held: Vec<bool>,
    held_of_layer: Vec<usize>,
    in_use: Vec<Key>,
}

impl Frequency {
    fn new(trace: &Trace, slots: usize, half_life: u32) -> Self {
        let n_keys = trace.n_layers * trace.n_experts;
        Self {
            slots,
            n_experts: trace.n_experts,
            half_life,
            floor: trace.n_used.min(slots / trace.n_layers),
            scores: vec![0.0; n_keys],
            used_at: vec![0; n_keys],
            clock: 0,
            visits: vec![0; trace.n_layers],
            held: Vec::new(),
            is_held: vec![false; n_keys],
            held_of_layer: vec![0; trace.n_layers],
            in_use: Vec::new(),
        }
    }

    /// Position in `held` of the expert that makes room for one of `layer`: lowest score, then oldest; none in use, and
    /// none of another layer at its floor.
    fn victim(&self, layer: usize) -> Option<usize> {
        let may_go = |key: Key| {
            let of = key / self.n_experts;
            (of == layer || self.held_of_layer[of] > self.floor) && !self.in_use.contains(&key)
        };
        let places = (0..self.held.len()).filter(|&place| may_go(self.held[place]));
        places.min_by(|&a, &b| {
            let (a, b) = (self.held[a], self.held[b]);
            self.scores[a].total_cmp(&self.scores[b]).then(self.used_at[a].cmp(&self.used_at[b]))
        })
    }
}

impl Cache for Frequency {
    fn begin(&mut self, layer: usize, keys: &[Key]) {
        self.visits[layer] += 1;
        if self.visits[layer].is_multiple_of(self.half_life) {
            for score in &mut self.scores[layer * self.n_experts..][..self.n_experts] {
                *score *= 0.5;
            }
        }
        self.in_use = keys.to_vec();
        for &key in keys {
            self.scores[key] += 1.0;
        }
    }

    fn holds(&self, key: Key) -> bool {
        self.is_held[key]
    }

    fn hit(&mut self, key: Key) {
        self.clock += 1;
        self.used_at[key] = self.clock;
    }

    fn miss(&mut self, key: Key) {
        self.hit(key);
        let layer = key / self.n_experts;
        if self.held.len() < self.slots {
            self.held.push(key);
        } else {
            let Some(place) = self.victim(layer) else { return };
            let victim = self.held[place];
            if self.held_of_layer[layer] >= self.floor && self.scores[key] <= self.scores[victim] {
                return;
            }
            self.held[place] = key;
            self.is_held[victim] = false;
            self.held_of_layer[victim / self.n_experts] -= 1;
        }
        self.is_held[key] = true;
        self.held_of_layer[layer] += 1;
    }
}

struct Oracle {
    slots: usize,
    /// Visits that use each expert, ascending.
    uses: HashMap<Key, Vec<usize>>,
    next_use: HashMap<Key, usize>,
    by_next_use: BTreeSet<(usize, Key)>,
    visit: usize,
}

impl Oracle {
    fn new(trace: &Trace, slots: usize) -> Self {
        let mut uses: HashMap<Key, Vec<usize>> = HashMap::new();
        for (number, visit) in (1..).zip(&trace.visits) {
            for key in keys(trace, visit) {
                uses.entry(key).or_default().push(number);
            }
        }
        Self { slots, uses, next_use: HashMap::new(), by_next_use: BTreeSet::new(), visit: 0 }
    }

    fn next_use_of(&self, key: Key) -> usize {
        let uses = self.uses.get(&key).map_or(&[][..], Vec::as_slice);
        uses.get(uses.partition_point(|&visit| visit <= self.visit)).copied().unwrap_or(usize::MAX)
    }

    fn keep(&mut self, key: Key) {
        let next = self.next_use_of(key);
        if let Some(before) = self.next_use.insert(key, next) {
            self.by_next_use.remove(&(before, key));
        }
        self.by_next_use.insert((next, key));
    }
}

impl Cache for Oracle {
    fn begin(&mut self, _: usize, _: &[Key]) {
        self.visit += 1;
    }

    fn holds(&self, key: Key) -> bool {
        self.next_use.contains_key(&key)
    }

    fn hit(&mut self, key: Key) {
        self.keep(key);
    }

    fn miss(&mut self, key: Key) {
        if self.next_use.len() == self.slots {
            let Some(&(latest, victim)) = self.by_next_use.last() else { return };
            if latest <= self.next_use_of(key) {
                return;
            }
            self.by_next_use.remove(&(latest, victim));
            self.next_use.remove(&victim);
        }
        self.keep(key);
    }
}

/// Hit rates over slots, one line a policy.
///
/// # Errors
/// If there are no outcomes.
pub fn chart(title: &str, outcomes: &[Outcome]) -> Result<String, PlotError> {
    let mut series: Vec<Series> = Vec::new();
    for outcome in outcomes {
        let point = (outcome.slots as f64, 100.0 * outcome.hit_rate);
        match series.iter_mut().find(|series| series.name == outcome.name) {
            Some(series) => series.points.push(point),
            None => series.push(Series { name: outcome.name.to_owned(), points: vec![point] }),
        }
    }
    LineChart {
        title: title.to_owned(),
        x_label: "slots (experts held in memory)".to_owned(),
        y_label: "hit rate, %".to_owned(),
        x_scale: Scale::Log2,
        y_range: Some((0.0, 100.0)),
        series,
    }
    .to_svg()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A sequence of single experts of one layer.
    fn sequence(ids: &[u32]) -> Trace {
        let visit = |(position, &id)| Visit {
            phase: Phase::Decode,
            position,
            layer: 0,
            ids: vec![id],
            weights: vec![1.0],
        };
        Trace { n_layers: 1, n_experts: 8, n_used: 1, visits: ids.iter().enumerate().map(visit).collect() }
    }

    /// A sequence that repeats itself a little, of `n_layers` layers and two experts a visit.
    fn mixed(n_layers: usize, n_tokens: usize) -> Trace {
        let mut state = 1_u64;
        let mut next = |n: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((state >> 33) % n) as u32
        };
        let mut visits = Vec::new();
        for position in 0..n_tokens {
            for layer in 0..n_layers {
                let first = next(16).min(next(16));
                let ids = vec![first, (first + 1 + next(15)) % 16];
                visits.push(Visit { phase: Phase::Decode, position, layer, ids, weights: vec![0.5; 2] });
            }
        }
        Trace { n_layers, n_experts: 16, n_used: 2, visits }
    }

    fn hits(trace: &Trace, policy: Policy, slots: usize) -> u64 {
        replay(trace, policy, slots, Counted::default()).unwrap().hits
    }

    const FREQUENCY: Policy = Policy::DecayedFrequency { half_life: 256 };

    /// Most hits that any choice of victims allows, by trying all of them.
    fn best(ids: &[u32], held: &[u32], slots: usize) -> u64 {
        let Some((&id, rest)) = ids.split_first() else { return 0 };
        if held.contains(&id) {
            return 1 + best(rest, held, slots);
        }
        let mut most = best(rest, held, slots);
        if held.len() < slots {
            return most.max(best(rest, &[held, &[id]].concat(), slots));
        }
        for victim in held {
            let kept: Vec<_> = held.iter().copied().filter(|other| other != victim).chain([id]).collect();
            most = most.max(best(rest, &kept, slots));
        }
        most
    }

    #[test]
    fn the_oracle_is_as_good_as_the_best_of_all_choices() {
        for seed in 0..20_u32 {
            let ids: Vec<u32> = (0..11).map(|i| (i * i * 5 + i * seed + seed / 3) % 6).collect();
            for slots in 1..4 {
                assert_eq!(
                    hits(&sequence(&ids), Policy::Oracle, slots),
                    best(&ids, &[], slots),
                    "{ids:?}, {slots}"
                );
            }
        }
    }

    #[test]
    fn an_lru_hit_is_a_use_with_fewer_others_than_slots_since_the_last() {
        let ids: Vec<u32> = mixed(1, 300).visits.iter().map(|visit| visit.ids[0] % 8).collect();
        for slots in 1..9 {
            let within_reach = |now: usize| {
                let before = ids[..now].iter().rposition(|id| *id == ids[now])?;
                let others: BTreeSet<_> = ids[before + 1..now].iter().collect();
                (others.len() < slots).then_some(())
            };
            let expected = (0..ids.len()).filter_map(within_reach).count() as u64;
            assert_eq!(hits(&sequence(&ids), Policy::LeastRecentlyUsed, slots), expected, "{slots} slots");
        }
    }

    #[test]
    fn frequent_experts_stay_when_others_pass_by() {
        let ids = [0, 0, 0, 1, 2, 3, 4, 5, 0];
        assert_eq!(hits(&sequence(&ids), FREQUENCY, 1), 3);
        assert_eq!(hits(&sequence(&ids), Policy::LeastRecentlyUsed, 1), 2);
        // Halved at every visit: the first expert scores 1.75 after three uses, 0.875 when the second comes with 1.
        assert_eq!(hits(&sequence(&[0, 0, 0, 1, 1, 1, 1]), Policy::DecayedFrequency { half_life: 1 }, 1), 5);
    }

    #[test]
    fn no_policy_beats_the_oracle_and_a_cache_of_everything_misses_once_each() {
        let trace = mixed(4, 150);
        for slots in [2, 4, 8, 16, 32, 64] {
            let oracle = hits(&trace, Policy::Oracle, slots);
            for policy in [Policy::LeastRecentlyUsed, FREQUENCY] {
                assert!(hits(&trace, policy, slots) <= oracle, "{policy:?} with {slots}");
            }
        }
        for policy in [Policy::LeastRecentlyUsed, FREQUENCY, Policy::Oracle] {
            let all = replay(&trace, policy, 64, Counted::default()).unwrap();
            assert_eq!(all.misses as usize, trace.n_distinct());
        }
        assert!(matches!(
            replay(&trace, FREQUENCY, 1, Counted::default()),
            Err(TraceError::TooFewSlots { .. })
        ));
    }

    #[test]
    fn only_what_counts_is_counted() {
        let mut trace = sequence(&[0, 0, 0, 0]);
        trace.visits[0].phase = Phase::Prefill;
        let counted = |counted| {
            let outcome = replay(&trace, Policy::LeastRecentlyUsed, 1, counted).unwrap();
            (outcome.hits, outcome.misses)
        };
        assert_eq!(counted(Counted::default()), (3, 1));
        assert_eq!(counted(Counted { decode_only: true, ..Counted::default() }), (3, 0));
        assert_eq!(counted(Counted { from_position: 3, decode_only: false }), (1, 0));
    }
}
