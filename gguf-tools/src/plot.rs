//! Pictures for reports, as SVG text: line charts, bar charts and heat maps of plain numbers.
//!
//! The same numbers give the same bytes. Nothing outside this file knows the drawing library.

use plotters::coord::Shift;
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

/// Colours of series, told apart also by readers who do not see red and green (Okabe and Ito's set).
const COLOURS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(230, 159, 0),
    RGBColor(60, 60, 60),
];
const INK: RGBColor = RGBColor(40, 44, 52);
const GRID: RGBColor = RGBColor(228, 230, 234);
/// Cells without a value: far from every colour of [`RAMP`].
const MISSING: RGBColor = RGBColor(213, 94, 0);
/// Low to high, light to dark, so that it survives a black and white print.
const RAMP: [RGBColor; 5] = [
    RGBColor(247, 251, 255),
    RGBColor(189, 215, 231),
    RGBColor(107, 174, 214),
    RGBColor(33, 113, 181),
    RGBColor(8, 37, 88),
];
/// Steps of the ramp: more are not told apart, and fewer make smaller files.
const RAMP_STEPS: f64 = 63.0;
/// Height of the band that holds the title.
const TITLE_PIXELS: u32 = 44;
/// Most tick labels along a heat map's axis.
const MOST_TICKS: usize = 12;

type Canvas<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Plane = Cartesian2d<RangedCoordf64, RangedCoordf64>;

/// Why a picture was not drawn.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlotError {
    /// There is nothing to draw.
    #[error("the picture `{title}` has no values")]
    Empty {
        /// Title of the picture.
        title: String,
    },
    /// A number that has no place on an axis.
    #[error(
        "the picture `{title}` cannot show {found}; expected finite numbers, above 0 on a logarithmic axis"
    )]
    Unplaceable {
        /// Title of the picture.
        title: String,
        /// The number.
        found: f64,
    },
    /// The values of a heat map are not one for each cell.
    #[error("the picture `{title}` has {found} values, expected {n_rows} x {n_columns}")]
    WrongShape {
        /// Title of the picture.
        title: String,
        /// Values given.
        found: usize,
        /// Rows of the map.
        n_rows: usize,
        /// Columns of the map.
        n_columns: usize,
    },
    /// The drawing library's own reason.
    #[error("cannot draw `{title}`: {reason}")]
    Drawing {
        /// Title of the picture.
        title: String,
        /// As it says.
        reason: String,
    },
}

/// How the values of an axis are spread.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Scale {
    /// Equal distances are equal differences.
    #[default]
    Linear,
    /// Equal distances are equal ratios; labels are powers of two.
    Log2,
}

impl Scale {
    fn place(self, value: f64) -> f64 {
        match self {
            Self::Linear => value,
            Self::Log2 => value.log2(),
        }
    }
}

/// One named line through points.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Series {
    /// Shown in the legend.
    pub name: String,
    /// `(x, y)`, in the order in which they are joined.
    pub points: Vec<(f64, f64)>,
}

/// Lines over common axes, with a legend and a mark at each point (up to 40 a line).
#[derive(Debug, Clone, Default, PartialEq)]
pub struct LineChart {
    /// Above the picture.
    pub title: String,
    /// Below the axis, with its unit.
    pub x_label: String,
    /// Beside the axis, with its unit.
    pub y_label: String,
    /// How x is spread.
    pub x_scale: Scale,
    /// Lowest and highest y shown; what the points need if left out.
    pub y_range: Option<(f64, f64)>,
    /// The lines.
    pub series: Vec<Series>,
}

/// One bar, perhaps with an interval of uncertainty.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Bar {
    /// Below the bar.
    pub name: String,
    /// Height; may be negative.
    pub value: f64,
    /// Ends of the whisker.
    pub interval: Option<(f64, f64)>,
}

/// Bars side by side, each labelled with its value.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct BarChart {
    /// Above the picture.
    pub title: String,
    /// Beside the axis, with its unit.
    pub y_label: String,
    /// The bars, left to right.
    pub bars: Vec<Bar>,
}

/// A matrix of numbers as colours, light for low and dark for high; cells without a value stand out.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct HeatMap {
    /// Above the picture.
    pub title: String,
    /// What columns are.
    pub x_label: String,
    /// What rows are.
    pub y_label: String,
    /// What the colours mean, with the unit.
    pub value_label: String,
    /// What a cell without a value means.
    pub missing_label: String,
    /// Number of rows; the first is drawn at the top.
    pub n_rows: usize,
    /// Number of columns.
    pub n_columns: usize,
    /// `[n_rows, n_columns]`.
    pub values: Vec<Option<f64>>,
}

/// Draws onto a white canvas with a title, and hands out the rest of it.
fn draw(
    title: &str,
    (width, height): (u32, u32),
    body: impl FnOnce(&Canvas<'_>) -> Result<(), Box<dyn std::error::Error>>,
) -> Result<String, PlotError> {
    let mut svg = String::new();
    let drawn = (|| {
        let canvas = SVGBackend::with_string(&mut svg, (width, height)).into_drawing_area();
        canvas.fill(&WHITE)?;
        let (head, rest) = canvas.split_vertically(TITLE_PIXELS);
        head.draw(&Text::new(title.to_owned(), (16, 14), text(20)))?;
        body(&rest)?;
        canvas.present()?;
        Ok::<_, Box<dyn std::error::Error>>(())
    })();
    drawn.map_err(|e| PlotError::Drawing { title: title.to_owned(), reason: e.to_string() })?;
    Ok(svg)
}

fn text(size: u32) -> TextStyle<'static> {
    ("sans-serif", size).into_font().color(&INK)
}

fn centred(size: u32) -> TextStyle<'static> {
    text(size).pos(Pos::new(HPos::Center, VPos::Center))
}

/// Lowest and highest of the values, refusing what has no place.
fn span(title: &str, values: impl Iterator<Item = f64>) -> Result<(f64, f64), PlotError> {
    let mut span: Option<(f64, f64)> = None;
    for value in values {
        if !value.is_finite() {
            return Err(PlotError::Unplaceable { title: title.to_owned(), found: value });
        }
        let (low, high) = span.unwrap_or((value, value));
        span = Some((low.min(value), high.max(value)));
    }
    span.ok_or_else(|| PlotError::Empty { title: title.to_owned() })
}

/// Room around a span, and some for a span of no width.
fn widened((low, high): (f64, f64), share: f64) -> (f64, f64) {
    let room = match (high - low) * share {
        room if room > 0.0 => room,
        _ => low.abs().max(1.0) * 0.5,
    };
    (low - room, high + room)
}

/// A number as short as it can be read: at most four significant digits.
fn short(value: f64) -> String {
    if value == 0.0 {
        return "0".to_owned();
    }
    let magnitude = value.abs().log10().floor();
    if !(-4.0..7.0).contains(&magnitude) {
        return format!("{value:.2e}");
    }
    let digits = (3.0 - magnitude).clamp(0.0, 8.0) as usize;
    let fixed = format!("{value:.digits$}");
    if fixed.contains('.') { fixed.trim_end_matches('0').trim_end_matches('.').to_owned() } else { fixed }
}

impl LineChart {
    /// The picture as SVG text.
    ///
    /// # Errors
    /// If there are no points, or one has no place on its axis.
    pub fn to_svg(&self) -> Result<String, PlotError> {
        let points = || self.series.iter().flat_map(|series| &series.points);
        let x = span(&self.title, points().map(|&(x, _)| self.x_scale.place(x)))?;
        let y = span(&self.title, points().map(|&(_, y)| y))?;
        let (x, y) = (widened(x, 0.03), self.y_range.unwrap_or_else(|| widened(y, 0.08)));
        draw(&self.title, (920, 480), |canvas| {
            let (left, legend) = canvas.split_horizontally(720);
            let mut chart = ChartBuilder::on(&left)
                .margin_right(12)
                .margin_left(8)
                .margin_bottom(8)
                .x_label_area_size(46)
                .y_label_area_size(66)
                .build_cartesian_2d(x.0..x.1, y.0..y.1)?;
            let x_label = |&place: &f64| match self.x_scale {
                Scale::Linear => short(place),
                Scale::Log2 => short(place.exp2()),
            };
            mesh(&mut chart, &self.x_label, &self.y_label, &x_label, 10)?;
            for (series, colour) in self.series.iter().zip(COLOURS.iter().cycle()) {
                let places: Vec<_> = series.points.iter().map(|&(x, y)| (self.x_scale.place(x), y)).collect();
                if places.len() <= 40 {
                    chart.draw_series(places.iter().map(|&p| Circle::new(p, 4, colour.filled())))?;
                }
                chart.draw_series(LineSeries::new(places, colour.stroke_width(2)))?;
            }
            let entries =
                self.series.iter().map(|series| series.name.as_str()).zip(COLOURS.into_iter().cycle());
            draw_legend(&legend, entries)
        })
    }
}

/// Axes with names, a light grid and short labels.
fn mesh(
    chart: &mut ChartContext<'_, SVGBackend<'_>, Plane>,
    x_name: &str,
    y_name: &str,
    x_label: &dyn Fn(&f64) -> String,
    n_x_labels: usize,
) -> Result<(), Box<dyn std::error::Error>> {
    chart
        .configure_mesh()
        .x_desc(x_name)
        .y_desc(y_name)
        .axis_desc_style(text(15))
        .label_style(text(13))
        .axis_style(INK.mix(0.6))
        .bold_line_style(GRID)
        .light_line_style(TRANSPARENT)
        .x_labels(n_x_labels)
        .y_labels(8)
        .x_label_formatter(x_label)
        .y_label_formatter(&|&y| short(y))
        .draw()?;
    Ok(())
}

/// Coloured squares with names, one below the other.
fn draw_legend<'a>(
    area: &Canvas<'_>,
    entries: impl Iterator<Item = (&'a str, RGBColor)>,
) -> Result<(), Box<dyn std::error::Error>> {
    for (i, (name, colour)) in entries.enumerate() {
        let top = 14 + 24 * i as i32;
        area.draw(&Rectangle::new([(4, top), (18, top + 14)], colour.filled()))?;
        area.draw(&Text::new(name.to_owned(), (26, top), text(15)))?;
    }
    Ok(())
}

impl BarChart {
    /// The picture as SVG text.
    ///
    /// # Errors
    /// If there are no bars, or a value is not finite.
    pub fn to_svg(&self) -> Result<String, PlotError> {
        let ends = self.bars.iter().flat_map(|bar| {
            let (low, high) = bar.interval.unwrap_or((bar.value, bar.value));
            [bar.value, low, high]
        });
        let (low, high) = span(&self.title, ends)?;
        let (low, high) = (low.min(0.0), high.max(0.0));
        let room = 0.1 * if high > low { high - low } else { 1.0 };
        let range = (if low < 0.0 { low - room } else { 0.0 })..(if high > 0.0 { high + room } else { room });
        let n_bars = self.bars.len() as f64;
        let width = (140 + 110 * self.bars.len() as u32).clamp(420, 1600);
        draw(&self.title, (width, 440), |canvas| {
            let mut chart = ChartBuilder::on(canvas)
                .margin_right(16)
                .margin_left(8)
                .x_label_area_size(44)
                .y_label_area_size(66)
                .build_cartesian_2d(-0.5..n_bars - 0.5, range.clone())?;
            mesh(&mut chart, "", &self.y_label, &|_| String::new(), 0)?;
            for (i, bar) in self.bars.iter().enumerate() {
                let (x, colour) = (i as f64, COLOURS[i % COLOURS.len()]);
                chart.draw_series([Rectangle::new(
                    [(x - 0.34, 0.0), (x + 0.34, bar.value)],
                    colour.filled(),
                )])?;
                if let Some((low, high)) = bar.interval {
                    let line = |points: Vec<_>| PathElement::new(points, INK.stroke_width(2));
                    chart.draw_series([
                        line(vec![(x, low), (x, high)]),
                        line(vec![(x - 0.06, low), (x + 0.06, low)]),
                        line(vec![(x - 0.06, high), (x + 0.06, high)]),
                    ])?;
                }
                let top = bar.interval.map_or(bar.value, |(_, high)| high).max(bar.value).max(0.0);
                let value = Text::new(short(bar.value), (0, -12), centred(14));
                chart.draw_series([EmptyElement::at((x, top)) + value])?;
                let name = Text::new(bar.name.clone(), (0, 18), centred(14));
                chart.draw_series([EmptyElement::at((x, range.start)) + name])?;
            }
            Ok(())
        })
    }
}

impl HeatMap {
    /// The picture as SVG text.
    ///
    /// # Errors
    /// If there are no cells, not one value for each, or one is not finite.
    pub fn to_svg(&self) -> Result<String, PlotError> {
        let (n_rows, n_columns) = (self.n_rows, self.n_columns);
        if n_rows.checked_mul(n_columns) != Some(self.values.len()) {
            let (title, found) = (self.title.clone(), self.values.len());
            return Err(PlotError::WrongShape { title, found, n_rows, n_columns });
        }
        if self.values.is_empty() {
            return Err(PlotError::Empty { title: self.title.clone() });
        }
        let (low, high) = if self.values.iter().any(Option::is_some) {
            span(&self.title, self.values.iter().copied().flatten())?
        } else {
            (0.0, 0.0)
        };
        // Cells of whole pixels, so that neighbours meet without seams.
        let cell_width = (900 / n_columns).clamp(2, 40) as u32;
        let cell_height = (560 / n_rows).clamp(4, 32) as u32;
        let (map_width, map_height) = (cell_width * n_columns as u32, cell_height * n_rows as u32);
        let (left, bottom) = (66, 54);
        let height = (map_height + bottom).max(220) + TITLE_PIXELS + 8;
        draw(&self.title, ((left + map_width + 220).max(480), height), |canvas| {
            let cells = canvas.margin(0, 0, left as i32, 0);
            let edge = |row: usize| (row as u32 * cell_height) as i32;
            for row in 0..n_rows {
                let steps: Vec<_> = (0..n_columns)
                    .map(|column| self.values[row * n_columns + column].map(|v| ramp_step(v, low, high)))
                    .collect();
                let mut first = 0;
                for run in steps.chunk_by(|a, b| a == b) {
                    let end = first + run.len() as u32 * cell_width;
                    let corners = [(first as i32, edge(row)), (end as i32, edge(row + 1))];
                    cells.draw(&Rectangle::new(corners, colour_of(run[0]).filled()))?;
                    first = end;
                }
            }
            let frame = [(0, 0), (map_width as i32, map_height as i32)];
            cells.draw(&Rectangle::new(frame, INK.mix(0.5).stroke_width(1)))?;
            self.label_axes(canvas, left as i32, (cell_width, cell_height))?;
            let side = canvas.margin(0, 0, (left + map_width + 24) as i32, 0);
            self.draw_scale(&side, (low, high))
        })
    }

    /// Names and numbers of rows and columns; `left`: where the cells begin.
    fn label_axes(
        &self,
        canvas: &Canvas<'_>,
        left: i32,
        (cell_width, cell_height): (u32, u32),
    ) -> Result<(), Box<dyn std::error::Error>> {
        let middle = |i: usize, cell: u32| (i as u32 * cell + cell / 2) as i32;
        let (width, height) =
            ((cell_width * self.n_columns as u32) as i32, (cell_height * self.n_rows as u32) as i32);
        for column in (0..self.n_columns).step_by(tick_step(self.n_columns)) {
            let place = (left + middle(column, cell_width), height + 14);
            canvas.draw(&Text::new(column.to_string(), place, centred(13)))?;
        }
        let beside = text(13).pos(Pos::new(HPos::Right, VPos::Center));
        for row in (0..self.n_rows).step_by(tick_step(self.n_rows)) {
            let place = (left - 8, middle(row, cell_height));
            canvas.draw(&Text::new(row.to_string(), place, beside.clone()))?;
        }
        canvas.draw(&Text::new(self.x_label.clone(), (left + width / 2, height + 38), centred(15)))?;
        let upright = centred(15).transform(FontTransform::Rotate270);
        canvas.draw(&Text::new(self.y_label.clone(), (18, height / 2), upright))?;
        Ok(())
    }

    /// The colours with their numbers.
    fn draw_scale(
        &self,
        side: &Canvas<'_>,
        (low, high): (f64, f64),
    ) -> Result<(), Box<dyn std::error::Error>> {
        side.draw(&Text::new(self.value_label.clone(), (0, 0), text(14)))?;
        let (top, length) = (26, 128);
        for step in 0..64 {
            let y = top + length - 2 * (step + 1);
            let colour = colour_of(Some(step as u8));
            side.draw(&Rectangle::new([(0, y), (18, y + 2)], colour.filled()))?;
        }
        let beside = text(13).pos(Pos::new(HPos::Left, VPos::Center));
        for (share, y) in [(1.0, top), (0.5, top + length / 2), (0.0, top + length)] {
            side.draw(&Text::new(short(low + share * (high - low)), (26, y), beside.clone()))?;
        }
        if self.values.iter().any(Option::is_none) {
            let y = top + length + 18;
            side.draw(&Rectangle::new([(0, y), (18, y + 14)], MISSING.filled()))?;
            side.draw(&Text::new(self.missing_label.clone(), (26, y + 7), beside))?;
        }
        Ok(())
    }
}

/// Every how many rows or columns carry a number: 1, 2 or 5 times a power of ten, or a power of two from 16 on.
fn tick_step(n: usize) -> usize {
    [1, 2, 5, 8, 16, 32, 64, 128]
        .into_iter()
        .find(|step| n.div_ceil(*step) <= MOST_TICKS + 4)
        .unwrap_or(n / MOST_TICKS)
}

fn ramp_step(value: f64, low: f64, high: f64) -> u8 {
    let share = if high > low { (value - low) / (high - low) } else { 0.5 };
    (share * RAMP_STEPS).round() as u8
}

fn colour_of(step: Option<u8>) -> RGBColor {
    let Some(step) = step else { return MISSING };
    let place = f64::from(step) / RAMP_STEPS * (RAMP.len() - 1) as f64;
    let below = (place as usize).min(RAMP.len() - 2);
    let share = place - below as f64;
    let (a, b) = (RAMP[below], RAMP[below + 1]);
    let mix = |a: u8, b: u8| (f64::from(a) + share * (f64::from(b) - f64::from(a))).round() as u8;
    RGBColor(mix(a.0, b.0), mix(a.1, b.1), mix(a.2, b.2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pictures_hold_every_name_and_value_and_are_the_same_each_time() {
        let lines = LineChart {
            title: "Hit rate".into(),
            x_label: "slots".into(),
            y_label: "hit rate, %".into(),
            x_scale: Scale::Log2,
            series: vec![
                Series { name: "LRU".into(), points: vec![(64.0, 10.0), (128.0, 40.0)] },
                Series { name: "oracle".into(), points: vec![(64.0, 30.0), (128.0, 60.0)] },
            ],
            ..LineChart::default()
        };
        let svg = lines.to_svg().unwrap();
        assert_eq!(svg, lines.to_svg().unwrap());
        for text in ["Hit rate", "slots", "hit rate, %", "LRU", "oracle"] {
            assert!(svg.contains(text), "{text}");
        }
        assert!(svg.matches("<polyline").count() >= 2);

        let bars = BarChart {
            title: "KL".into(),
            y_label: "nats".into(),
            bars: vec![
                Bar { name: "collected".into(), value: -0.25, interval: Some((-0.3, -0.2)) },
                Bar { name: "fallback".into(), value: 0.5, interval: None },
            ],
        };
        let svg = bars.to_svg().unwrap();
        assert!(["collected", "fallback", "-0.25", "0.5"].iter().all(|text| svg.contains(text)), "{svg}");

        let map = HeatMap {
            title: "Coverage".into(),
            missing_label: "never seen".into(),
            n_rows: 2,
            n_columns: 2,
            values: vec![Some(1.0), None, Some(3.0), Some(3.0)],
            ..HeatMap::default()
        };
        let svg = map.to_svg().unwrap();
        assert!(svg.contains("never seen") && svg.contains("#D55E00"));
    }

    #[test]
    fn what_cannot_be_drawn_is_refused_by_number() {
        assert!(matches!(LineChart::default().to_svg(), Err(PlotError::Empty { .. })));
        let points = vec![(0.0, 1.0)];
        let series = vec![Series { name: String::new(), points }];
        let chart = LineChart { x_scale: Scale::Log2, series, ..LineChart::default() };
        assert!(matches!(chart.to_svg(), Err(PlotError::Unplaceable { .. })));
        let bar = Bar { value: f64::NAN, ..Bar::default() };
        assert!(matches!(
            BarChart { bars: vec![bar], ..BarChart::default() }.to_svg(),
            Err(PlotError::Unplaceable { .. })
        ));
        let map = HeatMap { n_rows: 2, n_columns: 2, values: vec![None; 3], ..HeatMap::default() };
        assert!(matches!(map.to_svg(), Err(PlotError::WrongShape { found: 3, .. })));
    }

    #[test]
    fn numbers_are_short_and_names_are_escaped() {
        let shown = [0.0, 1.0, 0.25, 1234.4, 0.00001234, 12_345_678.0].map(short);
        assert_eq!(shown, ["0", "1", "0.25", "1234", "1.23e-5", "1.23e7"]);
        let bars = vec![Bar { name: "a<b & c".into(), value: 1.0, interval: None }];
        let svg = BarChart { bars, ..BarChart::default() }.to_svg().unwrap();
        assert!(svg.contains("a&lt;b &amp; c"), "{svg}");
    }
}
