//! Tokens a second of decoding and reading with a whole model.
//!
//! `GGSMITH_BENCH_MODEL` names the model; without it the tiny checkpoint of the fixtures is taken.

use std::path::PathBuf;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use runner::{ActivationPrecision, Model, Options};

fn decode(criterion: &mut Criterion) {
    let path = std::env::var_os("GGSMITH_BENCH_MODEL").map(PathBuf::from);
    let path = path.or_else(|| Some(test_vectors::fixtures("a model to run")?.join("tiny-native")));
    let Some(path) = path else { return };
    for (name, activations) in ActivationPrecision::NAMES {
        let options = Options { activations, ..Options::default() };
        let model = Model::open(&path, options).expect("a sound model");
        let mut group = criterion.benchmark_group(format!("model {name}"));
        group.sample_size(10);
        let prompt: Vec<u32> = (0..256).collect();
        group.throughput(Throughput::Elements(prompt.len() as u64));
        group.bench_function("read 256 tokens", |bencher| {
            bencher.iter(|| model.session().prefill(&prompt).expect("the prompt fits"));
        });
        let mut session = model.session();
        session.prefill(&prompt).expect("the prompt fits");
        let start = session.snapshot();
        const STEPS: u32 = 16;
        group.throughput(Throughput::Elements(u64::from(STEPS)));
        group.bench_function("decode at 256 tokens", |bencher| {
            bencher.iter(|| {
                session.restore(&start);
                for token in 0..STEPS {
                    session.decode(token).expect("the token fits");
                }
            });
        });
        group.finish();
    }
}

criterion_group!(benches, decode);
criterion_main!(benches);
