//! What can be chosen about the walk. Defaults are those that gave the least divergence (`docs/feedback.md`).

use std::fmt;
use std::str::FromStr;

use super::factor::Order;

/// How a walk is done.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// Added to the diagonal, as a multiple of its mean.
    pub damping: f64,
    /// The same for second moments of mids.
    pub mid_damping: f64,
    /// Scales of a finished row are raised until `sum h q w` is this share of `sum h w^2`, `h` being the diagonal, for formats
    /// with a codebook; 0: never.
    pub alignment: f64,
    /// The same for formats with one code a value.
    pub scalar_alignment: f64,
    /// Order of the columns.
    pub order: Order,
    /// Factors on the guessed `d` that are tried; every row of a super-block keeps the best.
    pub d_factors: Vec<f32>,
    /// Times that `d` is fitted to the codes found and the super-block walked again.
    pub refits: u32,
    /// Scale indices on each side of the guessed one that are tried.
    pub reach: u32,
    /// Sweeps after the walk, in which every choice is made again given all the others; they end where nothing changes.
    pub sweeps: u32,
    /// Share of the layer's mean in an expert's second moments of inputs.
    pub mix: f64,
    /// Tokens at which the layer's mean and the expert's own second moments have equal weight.
    pub prior_tokens: f64,
    /// Share of the diagonal that second moments of mids are reduced to, besides that by `prior_tokens`.
    pub mid_shrinkage: f64,
    /// An input counts in the second moments of gate and up with this power of the squared length of what the expert makes of
    /// it, its mid times its route weight; 0: all count alike.
    pub response_power: f64,
    /// Tokens count with this power of how much a change of the FFN's output matters to what follows, from 0 (all alike) to 1.
    pub sensitivity_power: f64,
    /// Whether down projections are made for the mids that the quantized gate and up projections give, and corrected for what those
    /// have changed.
    pub corrected_mids: bool,
    /// Holds the correction back, as a multiple of the mean diagonal.
    pub ridge: f64,
    /// A mid counts in the second moments with this power of its squared length, from -1 (all alike) to 0 (as it is).
    pub mid_power: f64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            damping: 0.1,
            mid_damping: 0.1,
            alignment: 0.98,
            scalar_alignment: 0.97,
            order: Order::Descending,
            d_factors: vec![0.94, 1.0, 1.06],
            refits: 2,
            reach: 2,
            sweeps: 4,
            mix: 0.2,
            prior_tokens: 0.0,
            mid_shrinkage: 0.2,
            response_power: 0.5,
            sensitivity_power: 1.0,
            corrected_mids: true,
            ridge: 0.5,
            mid_power: -0.5,
        }
    }
}

/// A text that sets nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("feedback setting `{text}`: {problem}")]
pub struct UnknownSetting {
    /// As given.
    pub text: String,
    /// What is wrong and what would be right.
    pub problem: String,
}

impl Settings {
    /// Changes one setting: `damping=0.02`.
    ///
    /// # Errors
    /// [`UnknownSetting`] if there is none of that name or the value makes no sense.
    pub fn set(&mut self, text: &str) -> Result<(), UnknownSetting> {
        let problem = |problem: &str| UnknownSetting { text: text.to_owned(), problem: problem.to_owned() };
        let (name, value) = text.split_once('=').ok_or_else(|| problem("expected NAME=VALUE"))?;
        let share = || number(value, 0.0..=1.0).ok_or_else(|| problem("expected a number from 0 to 1"));
        let alignment =
            || number(value, 0.0..=1.25).ok_or_else(|| problem("expected a share from 0 to 1.25"));
        let count = || {
            value.parse().ok().filter(|&n| n <= 64).ok_or_else(|| problem("expected a whole number up to 64"))
        };
        match name {
            "damping" => self.damping = share()?,
            "mid-damping" => self.mid_damping = share()?,
            "alignment" => self.alignment = alignment()?,
            "scalar-alignment" => self.scalar_alignment = alignment()?,
            "mix" => self.mix = share()?,
            "mid-shrinkage" => self.mid_shrinkage = share()?,
            "prior-tokens" => {
                self.prior_tokens =
                    number(value, 0.0..=1e9).ok_or_else(|| problem("expected a number of tokens"))?;
            }
            "order" => {
                let found = Order::NAMES.iter().find(|(name, _)| *name == value);
                self.order = found.ok_or_else(|| problem("expected natural or descending"))?.1;
            }
            "d-factors" => {
                let factors: Option<Vec<f32>> =
                    value.split('/').map(|v| number(v, 0.1..=10.0).map(|v| v as f32)).collect();
                self.d_factors =
                    factors.ok_or_else(|| problem("expected factors from 0.1 to 10, as 0.9/1/1.1"))?;
            }
            "corrected-mids" => {
                self.corrected_mids = value.parse().map_err(|_| problem("expected true or false"))?;
            }
            "ridge" => {
                self.ridge = number(value, 1e-6..=1e3)
                    .ok_or_else(|| problem("expected a number from 0.000001 to 1000"))?;
            }
            "mid-power" => {
                self.mid_power =
                    number(value, -1.0..=0.0).ok_or_else(|| problem("expected a power from -1 to 0"))?;
            }
            "sensitivity-power" => self.sensitivity_power = share()?,
            "response-power" => self.response_power = share()?,
            "refits" => self.refits = count()?,
            "reach" => self.reach = count()?,
            "sweeps" => self.sweeps = count()?,
            _ => {
                return Err(problem(
                    "known are damping, mid-damping, alignment, scalar-alignment, order, d-factors, refits, reach, sweeps, mix, prior-tokens, mid-shrinkage, response-power, sensitivity-power, corrected-mids, ridge, mid-power",
                ));
            }
        }
        Ok(())
    }
}

fn number(text: &str, range: std::ops::RangeInclusive<f64>) -> Option<f64> {
    text.parse().ok().filter(|v| range.contains(v))
}

impl FromStr for Settings {
    type Err = UnknownSetting;

    /// Defaults with some changed: `damping=0.02,mix=0.1`.
    fn from_str(text: &str) -> Result<Self, UnknownSetting> {
        let mut settings = Self::default();
        text.split(',').filter(|part| !part.is_empty()).try_for_each(|part| settings.set(part))?;
        Ok(settings)
    }
}

impl fmt::Display for Settings {
    /// Every setting, in a form that [`FromStr`] reads.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let order = Order::NAMES.iter().find(|(_, order)| *order == self.order).map_or("", |(name, _)| name);
        let factors: Vec<_> = self.d_factors.iter().map(f32::to_string).collect();
        write!(
            f,
            "damping={},mid-damping={},alignment={},scalar-alignment={},order={order},d-factors={},refits={},reach={},sweeps={},mix={},prior-tokens={},mid-shrinkage={},response-power={},sensitivity-power={},corrected-mids={},ridge={},mid-power={}",
            self.damping,
            self.mid_damping,
            self.alignment,
            self.scalar_alignment,
            factors.join("/"),
            self.refits,
            self.reach,
            self.sweeps,
            self.mix,
            self.prior_tokens,
            self.mid_shrinkage,
            self.response_power,
            self.sensitivity_power,
            self.corrected_mids,
            self.ridge,
            self.mid_power,
        )
    }
}
