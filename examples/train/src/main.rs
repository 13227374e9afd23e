//! Trains a character transformer on a text: candle multiplies matrices, flashtile computes attention and its gradients.
//!
//! ```sh
//! cargo run --release --manifest-path examples/train/Cargo.toml
//! ```

mod model;

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, Tensor};
use candle_nn::loss::cross_entropy;
use candle_nn::{AdamW, Optimizer, ParamsAdamW};
use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use model::{Model, Sizes};
use plotters::prelude::*;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::io::{IsTerminal, Write, stderr};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Trains a character transformer of half a million parameters on a text, until its loss is below a bound.
#[derive(Debug, Parser)]
struct Options {
    /// The text, or a folder whose Markdown files are it.
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs"))]
    text: PathBuf,
    /// Steps of the optimizer at most.
    #[arg(long, default_value_t = 1500)]
    steps: usize,
    /// Ends when the mean loss of the last 50 steps is below this, in nats of a character. Fails if no step gets there.
    #[arg(long, default_value_t = 2.2)]
    until: f64,
    /// Sequences of a step.
    #[arg(long, default_value_t = 8)]
    batch: usize,
    /// Learning rate.
    #[arg(long, default_value_t = 3e-3)]
    rate: f64,
    /// Seed of the parameters and of the order of the text.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Writes the loss curve to this SVG file.
    #[arg(long)]
    svg: Option<PathBuf>,
    /// Trains an f64 twin beside it, with attention in candle's operations, for all steps, and writes parameters, tokens and both loss curves
    /// to this folder: compare.py trains the same in PyTorch.
    #[arg(long)]
    twin: Option<PathBuf>,
}

/// Tokens of a sequence.
const CONTEXT: usize = 128;

/// Steps over which the loss is averaged.
const AVERAGED: usize = 50;

/// Tokens of a text, and what they stand for.
struct Text {
    tokens: Vec<u32>,
    characters: Vec<char>,
}

impl Text {
    fn read(path: &Path) -> Result<Self> {
        let text = if path.is_dir() {
            let entries =
                std::fs::read_dir(path)?.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
            let mut files: Vec<_> =
                entries.into_iter().filter(|file| file.extension().is_some_and(|ext| ext == "md")).collect();
            files.sort();
            files.iter().map(std::fs::read_to_string).collect::<Result<String, _>>()?
        } else {
            std::fs::read_to_string(path).with_context(|| path.display().to_string())?
        };
        let mut characters: Vec<char> = text.chars().collect();
        characters.sort_unstable();
        characters.dedup();
        let token = |c: char| characters.binary_search(&c).unwrap_or_default() as u32;
        let tokens: Vec<u32> = text.chars().map(token).collect();
        ensure!(
            tokens.len() > CONTEXT + 1,
            "{}: {} characters, expected more than {CONTEXT}",
            path.display(),
            tokens.len()
        );
        Ok(Self { tokens, characters })
    }

    /// Tokens `(batch, CONTEXT + 1)` from random places.
    fn batch(&self, batch: usize, rng: &mut StdRng) -> Result<Tensor> {
        let mut tokens = Vec::with_capacity(batch * (CONTEXT + 1));
        for _ in 0..batch {
            let start = rng.random_range(0..self.tokens.len() - CONTEXT);
            tokens.extend_from_slice(&self.tokens[start..=start + CONTEXT]);
        }
        Ok(Tensor::from_vec(tokens, (batch, CONTEXT + 1), &Device::Cpu)?)
    }
}

/// A model and its optimizer.
struct Trainer {
    model: Model,
    optimizer: AdamW,
    losses: Vec<f64>,
}

impl Trainer {
    fn new(model: Model, rate: f64) -> Result<Self> {
        let params = ParamsAdamW { lr: rate, beta2: 0.99, weight_decay: 0.01, ..ParamsAdamW::default() };
        let optimizer = AdamW::new(model.variables(), params)?;
        Ok(Self { model, optimizer, losses: Vec::new() })
    }

    /// One step over tokens `(batch, CONTEXT + 1)`.
    fn step(&mut self, tokens: &Tensor) -> Result<()> {
        let inputs = tokens.narrow(1, 0, CONTEXT)?;
        let targets = tokens.narrow(1, 1, CONTEXT)?.flatten_all()?;
        let logits = self.model.logits(&inputs)?;
        let loss = cross_entropy(&logits.flatten_to(1)?, &targets)?;
        self.optimizer.backward_step(&loss)?;
        self.losses.push(loss.to_dtype(DType::F64)?.to_scalar()?);
        Ok(())
    }

    /// The mean loss of the last steps.
    fn mean(&self) -> f64 {
        let last = &self.losses[self.losses.len().saturating_sub(AVERAGED)..];
        last.iter().sum::<f64>() / last.len() as f64
    }
}

fn progress(steps: usize) -> Result<ProgressBar> {
    if !stderr().is_terminal() {
        return Ok(ProgressBar::hidden());
    }
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} steps, loss {msg}, {eta} left")?;
    Ok(ProgressBar::new(steps as u64).with_style(style))
}

fn main() -> Result<()> {
    let options = Options::parse();
    ensure!(options.steps > 0 && options.batch > 0, "--steps and --batch are at least 1");
    let text = Text::read(&options.text)?;
    let vocabulary = text.characters.len();
    let sizes = Sizes { vocabulary, context: CONTEXT, layers: 2, width: 128, heads: 4, kv_heads: 2 };
    let model = Model::new(sizes, options.seed)?;
    let parameters: usize = model.variables().iter().map(|var| var.elem_count()).sum();
    println!("{} characters, {vocabulary} different ones; {parameters} parameters", text.tokens.len());
    let mut twin =
        options.twin.as_ref().map(|_| Trainer::new(model.to_dtype(DType::F64)?, options.rate)).transpose()?;
    let first = model.tensors();
    let copy = |(name, tensor): (&String, &Tensor)| Ok((name.clone(), tensor.copy()?));
    let mut first = first.iter().map(copy).collect::<Result<std::collections::HashMap<_, _>>>()?;
    let mut trainer = Trainer::new(model, options.rate)?;
    let (mut rng, mut batches) = (StdRng::seed_from_u64(options.seed), Vec::new());
    let (bar, began) = (progress(options.steps)?, Instant::now());
    while trainer.losses.len() < options.steps {
        let tokens = text.batch(options.batch, &mut rng)?;
        trainer.step(&tokens)?;
        if let Some(twin) = &mut twin {
            twin.step(&tokens)?;
            batches.push(tokens);
        }
        bar.set_message(format!("{:.3}", trainer.mean()));
        bar.inc(1);
        if twin.is_none() && trainer.losses.len() >= AVERAGED && trainer.mean() < options.until {
            break;
        }
    }
    bar.finish_and_clear();
    let (steps, seconds) = (trainer.losses.len(), began.elapsed().as_secs_f64());
    println!("loss {:.3} after {steps} steps, {:.0} ms a step", trainer.mean(), 1e3 * seconds / steps as f64);
    if let Some(file) = &options.svg {
        plot(file, &trainer.losses)?;
    }
    match (&options.twin, twin) {
        (Some(folder), Some(twin)) => {
            first.insert("rate".to_owned(), Tensor::new(options.rate, &Device::Cpu)?);
            write_twin(folder, first, &batches, [&trainer.losses, &twin.losses])
        }
        _ => {
            ensure!(
                trainer.mean() < options.until,
                "the loss is {:.3}, expected below {}",
                trainer.mean(),
                options.until
            );
            println!("{}", sample(&trainer.model, &text, &mut rng)?);
            Ok(())
        }
    }
}

/// A few lines of the model's own, each character drawn by its probability.
fn sample(model: &Model, text: &Text, rng: &mut StdRng) -> Result<String> {
    let mut tokens = text.tokens[..1].to_vec();
    let mut line = String::new();
    for _ in 0..200 {
        let context = &tokens[tokens.len().saturating_sub(CONTEXT)..];
        let logits = model.logits(&Tensor::new(context, &Device::Cpu)?.unsqueeze(0)?)?;
        let last = logits.get(0)?.get(context.len() - 1)?;
        let probs = candle_nn::ops::softmax(&last, 0)?.to_vec1::<f32>()?;
        let mut left = rng.random::<f32>();
        let drawn = probs.iter().position(|p| {
            left -= p;
            left <= 0.0
        });
        let token = drawn.unwrap_or(probs.len() - 1);
        line.push(text.characters[token]);
        tokens.push(token as u32);
    }
    Ok(line)
}

/// Writes what compare.py reads: parameters before the first step, tokens of each step, and loss curves.
fn write_twin(
    folder: &Path,
    mut tensors: std::collections::HashMap<String, Tensor>,
    batches: &[Tensor],
    losses: [&Vec<f64>; 2],
) -> Result<()> {
    std::fs::create_dir_all(folder)?;
    tensors.insert("batches".to_owned(), Tensor::stack(batches, 0)?);
    for (name, losses) in ["losses.f32", "losses.f64"].into_iter().zip(losses) {
        tensors.insert(name.to_owned(), Tensor::new(losses.as_slice(), &Device::Cpu)?);
    }
    candle_core::safetensors::save(&tensors, folder.join("train.safetensors"))?;
    let [of_f32, of_f64] = losses;
    let worst = of_f32.iter().zip(of_f64).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    println!("largest difference of the loss from the f64 twin: {worst:.2e}");
    Ok(())
}

/// Draws losses over steps.
fn plot(file: &Path, losses: &[f64]) -> Result<()> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, (720, 400)).into_drawing_area();
        area.fill(&WHITE)?;
        let top = losses.iter().copied().fold(0.0, f64::max) * 1.05;
        let mut chart = ChartBuilder::on(&area)
            .margin(16)
            .x_label_area_size(36)
            .y_label_area_size(44)
            .build_cartesian_2d(0..losses.len(), 0.0..top)?;
        chart.configure_mesh().x_desc("step").y_desc("loss, nats of a character").draw()?;
        chart.draw_series(LineSeries::new(losses.iter().copied().enumerate(), &BLUE))?;
        area.present()?;
    }
    std::fs::File::create(file)?.write_all(svg.as_bytes()).with_context(|| file.display().to_string())
}
