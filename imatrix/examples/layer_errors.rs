//! Error of the routed experts' sum, layer by layer, when each layer of a file reads what the source makes of a text.
//!
//!     cargo run --release -p imatrix --example layer_errors -- SOURCE TEXT FILE.gguf...

#![expect(clippy::print_stdout, reason = "a program")]

use std::path::Path;

use runner::observe::{Observation, Observer, Site};
use runner::tokenizer::Tokenizer;
use runner::{Model, Options};

struct Outputs(usize, Vec<f32>);

impl Observer for Outputs {
    fn wants(&self, site: Site, layer: Option<usize>) -> bool {
        site == Site::RoutedOutput && layer == Some(self.0)
    }

    fn rows(&mut self, observation: Observation<'_>) {
        self.1.extend_from_slice(observation.values);
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [source, text, files @ ..] = &arguments[..] else { return Err("SOURCE TEXT FILE.gguf...".into()) };
    let metadata = gguf_tools::gguf::Gguf::open(Path::new(&files[0]))?.metadata().clone();
    let tokenizer = Tokenizer::from_metadata(&metadata)?;
    let tokens = tokenizer.encode_plain(&std::fs::read_to_string(text)?)?;
    let texts: Vec<&[u32]> = tokens.chunks(512).take(6).collect();
    let model = Model::open(Path::new(source), Options::default())?;
    let others =
        files.iter().map(|f| Model::open(Path::new(f), Options::default())).collect::<Result<Vec<_>, _>>()?;
    let mut streams = model.embed_texts(&texts)?;
    for layer in 0..model.n_layers() {
        let mut right = Outputs(layer, Vec::new());
        let next = model.layer_of_texts(layer, 0, &texts, streams.clone(), &mut right)?;
        for (file, other) in files.iter().zip(&others) {
            let mut found = Outputs(layer, Vec::new());
            other.layer_of_texts(layer, 0, &texts, streams.clone(), &mut found)?;
            let dot = |a: &[f32], b: &[f32]| {
                a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>()
            };
            let (yy, yq, qq) = (dot(&right.1, &right.1), dot(&right.1, &found.1), dot(&found.1, &found.1));
            let width = model.hyper_parameters().hidden_size as usize;
            let mut worst: Vec<f64> = right
                .1
                .chunks_exact(width)
                .zip(found.1.chunks_exact(width))
                .map(|(a, b)| {
                    let d: Vec<f32> = a.iter().zip(b).map(|(a, b)| a - b).collect();
                    dot(&d, &d) / dot(a, a)
                })
                .collect();
            worst.sort_by(f64::total_cmp);
            let at = |share: f64| worst[(worst.len() as f64 * share) as usize];
            println!(
                "layer {layer} {:24} error {:.5} alignment {:.4} by token: median {:.4} 90 % {:.4} 99 % {:.4}",
                Path::new(file).file_name().unwrap_or_default().to_string_lossy(),
                (yy - 2.0 * yq + qq) / yy,
                yq / yy,
                at(0.5),
                at(0.9),
                at(0.99)
            );
        }
        streams = next;
    }
    Ok(())
}
