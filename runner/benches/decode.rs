//! Tokens a second of reading and decoding with a whole model: the nano model of this repository.

#[path = "../tests/nano_model/mod.rs"]
mod nano_model;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use gguf_tools::plan::Recipe;
use runner::{ActivationPrecision, Model, Options};

fn decode(criterion: &mut Criterion) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("q2.gguf");
    nano_model::write_gguf(
        nano_model::checkpoint(),
        &Recipe::built_in("q2").expect("a built-in recipe"),
        &file,
    );
    // The checkpoint is widened at loading; the file is computed from its blocks, as files of the full size.
    let models = [
        ("checkpoint", nano_model::checkpoint(), ActivationPrecision::F32, u64::MAX),
        ("q2 f32", &file, ActivationPrecision::F32, 0),
        ("q2 int8", &file, ActivationPrecision::Int8, 0),
    ];
    for (name, path, activations, widen_up_to_bytes) in models {
        let options = Options { activations, widen_up_to_bytes, ..Options::default() };
        let model = Model::open(path, options).expect("a sound model");
        let mut group = criterion.benchmark_group(format!("nano {name}"));
        group.sample_size(10);
        let prompt: Vec<u32> = (0..256).collect();
        group.throughput(Throughput::Elements(prompt.len() as u64));
        group.bench_function("read 256 tokens", |bencher| {
            bencher.iter(|| model.session().prefill(&prompt).expect("the prompt fits"));
        });
        let mut session = model.session();
        session.prefill(&prompt).expect("the prompt fits");
        let start = session.snapshot().unwrap();
        const STEPS: u32 = 16;
        group.throughput(Throughput::Elements(u64::from(STEPS)));
        group.bench_function("decode at 256 tokens", |bencher| {
            bencher.iter(|| {
                session.restore(&start).unwrap();
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
