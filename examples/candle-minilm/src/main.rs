//! Sentence embeddings by all-MiniLM-L6-v2 on the CPU: candle-transformers' BERT, and one with flashtile's attention. The paragraphs of a
//! text are embedded by both; the embeddings have to be equal to 1e-5.
//!
//! ```sh
//! examples/candle-minilm/fetch.py target/minilm
//! cargo run --release --manifest-path examples/candle-minilm/Cargo.toml -- target/minilm LICENSE-APACHE
//! ```

mod bert;

use bert::{Bert, Packed};
use candle_core::{DType, Device, IndexOp, Result, Tensor, bail};
use candle_nn::VarBuilder;
use candle_transformers::models::bert::{BertModel, Config};
use std::path::Path;
use std::time::{Duration, Instant};
use tokenizers::Tokenizer;

/// Tokens of a text at most, as sentence-transformers has it.
const MAX_TOKENS: usize = 256;
/// Texts of a batch: one alone has no padding.
const BATCHES: [usize; 2] = [16, 1];
const MAX_DISTANCE: f32 = 1e-5;

/// Token ids of each paragraph of a file.
fn tokens(folder: &Path, text: &str) -> Result<Vec<Vec<u32>>> {
    let mut tokenizer =
        Tokenizer::from_file(folder.join("tokenizer.json")).map_err(candle_core::Error::msg)?;
    tokenizer.with_padding(None);
    let truncation = tokenizers::TruncationParams { max_length: MAX_TOKENS, ..Default::default() };
    tokenizer.with_truncation(Some(truncation)).map_err(candle_core::Error::msg)?;
    let words = |paragraph: &str| paragraph.split_whitespace().collect::<Vec<_>>().join(" ");
    let paragraphs: Vec<String> = text.split("\n\n").map(words).filter(|text| !text.is_empty()).collect();
    let all = tokenizer.encode_batch(paragraphs, true).map_err(candle_core::Error::msg)?;
    Ok(all.iter().map(|of| of.get_ids().to_vec()).collect())
}

/// The mean of the rows of a text, of length 1.
fn pool(rows: &Tensor) -> Result<Tensor> {
    let mean = rows.mean(0)?;
    let length = mean.sqr()?.sum_all()?.sqrt()?;
    mean.broadcast_div(&length)
}

/// Embeddings by candle-transformers, whose batches are padded.
fn by_candle(model: &BertModel, batch: &[Vec<u32>]) -> Result<Vec<Tensor>> {
    let longest = batch.iter().map(Vec::len).max().unwrap_or(0);
    let padded = |of: &dyn Fn(&[u32], usize) -> u32| {
        let all: Vec<u32> = batch.iter().flat_map(|ids| (0..longest).map(|n| of(ids, n))).collect();
        Tensor::from_vec(all, (batch.len(), longest), &Device::Cpu)
    };
    let ids = padded(&|ids, n| ids.get(n).copied().unwrap_or(0))?;
    let mask = padded(&|ids, n| u32::from(n < ids.len()))?;
    let out = model.forward(&ids, &ids.zeros_like()?, Some(&mask))?;
    batch.iter().enumerate().map(|(n, ids)| pool(&out.i((n, ..ids.len()))?)).collect()
}

/// Embeddings with flashtile's attention over packed texts.
fn by_flashtile(model: &Bert, batch: &[Vec<u32>]) -> Result<Vec<Tensor>> {
    let list = |all: Vec<u32>| Tensor::new(all, &Device::Cpu);
    let mut ends = vec![0];
    for ids in batch {
        ends.push(ends[ends.len() - 1] + ids.len() as u32);
    }
    let texts = Packed {
        ids: list(batch.concat())?,
        positions: list(batch.iter().flat_map(|ids| 0..ids.len() as u32).collect())?,
        cu_seqlens: list(ends.clone())?,
        longest: batch.iter().map(Vec::len).max().unwrap_or(0),
    };
    let out = model.forward(&texts)?;
    ends.windows(2).map(|text| pool(&out.i(text[0] as usize..text[1] as usize)?)).collect()
}

/// The largest distance of two lists of embeddings; NaN where one has a NaN.
fn distance(a: &[Tensor], b: &[Tensor]) -> Result<f32> {
    let all = (Tensor::stack(a, 0)? - Tensor::stack(b, 0)?)?.abs()?.flatten_all()?.to_vec1::<f32>()?;
    Ok(all.into_iter().fold(0.0, |max, x| if x > max || x.is_nan() { x } else { max }))
}

/// Median times of two functions, measured alternately.
fn medians(mut a: impl FnMut() -> Result<()>, mut b: impl FnMut() -> Result<()>) -> Result<[Duration; 2]> {
    let mut times = [Vec::new(), Vec::new()];
    let mut timed = |of: usize, f: &mut dyn FnMut() -> Result<()>| {
        let start = Instant::now();
        f()?;
        times[of].push(start.elapsed());
        Ok::<_, candle_core::Error>(())
    };
    for round in 0..5 {
        if round % 2 == 0 {
            timed(0, &mut a)?;
            timed(1, &mut b)?;
        } else {
            timed(1, &mut b)?;
            timed(0, &mut a)?;
        }
    }
    Ok(times.map(|mut times| {
        times.sort_unstable();
        times[times.len() / 2]
    }))
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [folder, text] = arguments.as_slice() else { bail!("expected: FOLDER of the model, FILE to embed") };
    let folder = Path::new(folder);
    let texts = tokens(folder, &std::fs::read_to_string(text)?)?;
    if texts.is_empty() {
        bail!("{text} has no text, expected one in each line")
    }
    let config: Config = serde_json::from_slice(&std::fs::read(folder.join("config.json"))?)
        .map_err(candle_core::Error::wrap)?;
    let memory = std::fs::read(folder.join("model.safetensors"))?;
    let vb = VarBuilder::from_buffered_safetensors(memory, DType::F32, &Device::Cpu)?;
    let (theirs, ours) = (BertModel::load(vb.clone(), &config)?, Bert::load(&vb, &config)?);

    let count: usize = texts.iter().map(Vec::len).sum();
    println!("{} texts, {count} tokens, {} threads", texts.len(), candle_core::utils::get_num_threads());
    for size in BATCHES {
        let mut furthest = 0f32;
        for batch in texts.chunks(size) {
            let off = distance(&by_candle(&theirs, batch)?, &by_flashtile(&ours, batch)?)?;
            if off.is_nan() || off > MAX_DISTANCE {
                bail!("embeddings differ by {off:e}, expected at most {MAX_DISTANCE:e}")
            }
            furthest = furthest.max(off);
        }
        let [a, b] = medians(
            || texts.chunks(size).try_for_each(|batch| by_candle(&theirs, batch).map(drop)),
            || texts.chunks(size).try_for_each(|batch| by_flashtile(&ours, batch).map(drop)),
        )?
        .map(|time| texts.len() as f64 / time.as_secs_f64());
        println!("batches of {size}: embeddings equal to {furthest:.1e}");
        println!("  candle-transformers, padded  {a:7.1} texts/s");
        println!("  flashtile-candle, packed     {b:7.1} texts/s, {:.2} times as many", b / a);
    }
    Ok(())
}
