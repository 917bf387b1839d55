// Rates and quantiles of what happened between two answers of /v1/status.

const EMPTY = { bounds: [], counts: [], sum: 0 };

function distributionOf(before, now, same) {
  if (!same || before.counts.length !== now.counts.length) return EMPTY;
  return { bounds: now.bounds, counts: now.counts.map((count, index) => count - before.counts[index]), sum: now.sum - before.sum };
}

/** What happened since `before`: tokens a second of all engines, and the times that the same gateway measured. */
export function difference(before, now) {
  const seconds = now.time - before.time;
  let decode = 0;
  let prefill = 0;
  for (const engine of now.engines) {
    const known = before.engines.find((one) => one.id === engine.id);
    // A process that has started anew counts from 0.
    if (!known || known.tokens.decode > engine.tokens.decode || known.tokens.prefill > engine.tokens.prefill) continue;
    decode += engine.tokens.decode - known.tokens.decode;
    prefill += engine.tokens.prefill - known.tokens.prefill;
  }
  const same = before.gateway.id === now.gateway.id;
  return {
    decode: seconds > 0 ? decode / seconds : 0,
    prefill: seconds > 0 ? prefill / seconds : 0,
    firstToken: distributionOf(before.first_token, now.first_token, same),
    betweenTokens: distributionOf(before.between_tokens, now.between_tokens, same),
  };
}

/** A quantile by the buckets, linear within one; null: nothing was measured. */
export function quantile({ bounds, counts }, share) {
  const total = counts.reduce((sum, count) => sum + count, 0);
  if (!total) return null;
  let left = share * total;
  for (let index = 0; index < counts.length; index += 1) {
    if (left <= counts[index]) {
      const low = index ? bounds[index - 1] : 0;
      const high = bounds[index] ?? low;
      return counts[index] ? low + ((high - low) * left) / counts[index] : high;
    }
    left -= counts[index];
  }
  return bounds.at(-1) ?? null;
}
