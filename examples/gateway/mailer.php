<?php
// Produces and consumes tasks over HTTP with PHP 8 alone, without an extension but pcntl, which its command
// line has.
//
// php mailer.php produce ada grace     submits a mail to each, due in a second
// php mailer.php consume               sends what is due, until SIGTERM or Ctrl-C

declare(strict_types=1);

const ATTEMPTS = 8;

$stopping = false;

function main(array $words): void
{
    global $stopping;
    if ($words !== ['consume']) {
        array_map(produce(...), array_slice($words, 1));
        return;
    }
    pcntl_async_signals(true);
    foreach ([SIGTERM, SIGINT] as $number) {
        pcntl_signal($number, function () use (&$stopping): void {
            $stopping = true;
        });
    }
    while (!$stopping) {
        consume();
    }
}

/** Sends what is due. Waits for only a few seconds: PHP cannot break off a call when it is told to end. */
function consume(): void
{
    $found = call('topics/' . topic() . ':pull', ['max' => 10, 'wait' => 5, 'ttr' => 60]);
    $done = [];
    foreach ($found['tasks'] as $task) {
        if (send($task)) {
            $done[] = $task['lease'];
        }
    }
    if ($done) {
        call('leases:ack', ['leases' => $done]);
    }
}

/** Does the work. A task may come twice: whoever really sends uses its job_id as the message's id. */
function send(array $task): bool
{
    $to = $task['attribute']['to'] ?? null;
    if ($to === null) {
        call('leases:nack', ['lease' => $task['lease'], 'dead' => true, 'error' => 'there is no "to"']);
        return false;
    }
    echo "sent $to {$task['job_id']}\n";
    return true;
}

/** Submits one mail. Repeated after a lost answer, it gives the same task. */
function produce(string $to): void
{
    $key = "welcome-$to";
    $task = ['biz_id' => $to, 'delay' => 1, 'attribute' => ['to' => $to], 'dedup_key' => $key];
    $made = call('topics/' . topic() . '/tasks', $task, ["Idempotency-Key: $key"]);
    echo "submitted {$made['job_id']}\n";
}

/** Makes a call, again if it is worth it: the gateway is away, busy, or its answer was lost. */
function call(string $path, array $body, array $headers = []): array
{
    $http = [
        'method' => 'POST',
        'header' => [
            'Authorization: Bearer ' . getenv('TOKEN'),
            'Content-Type: application/json',
            ...$headers,
        ],
        'content' => json_encode($body, JSON_THROW_ON_ERROR | JSON_UNESCAPED_UNICODE),
        'timeout' => 90,
        'ignore_errors' => true, // the text of a refusal is read too
        'follow_location' => 0,
    ];
    for ($attempt = 0; $attempt < ATTEMPTS; $attempt++) {
        $http_response_header = [];
        $answer = @file_get_contents(getenv('TOC') . "/v1/$path", false, stream_context_create(['http' => $http]));
        $status = (int) (explode(' ', $http_response_header[0] ?? '')[1] ?? 0);
        $found = $answer === false ? null : json_decode($answer, true);
        if ($status >= 200 && $status < 300 && is_array($found)) {
            return $found;
        }
        if ($status >= 400 && $status !== 429 && $status !== 503) {
            fail("$path: $status $answer");
        }
        fwrite(STDERR, "again: $path\n");
        $pause = max(min(0.2 * 2 ** $attempt, 10.0), retry_after($http_response_header));
        usleep((int) ($pause * random_int(500_000, 1_000_000)));
    }
    fail("$path: no answer after " . ATTEMPTS . ' attempts');
}

function retry_after(array $headers): float
{
    foreach ($headers as $line) {
        if (stripos($line, 'retry-after:') === 0) {
            return (float) trim(substr($line, strlen('retry-after:')));
        }
    }
    return 0.0;
}

function topic(): string
{
    return getenv('TOPIC') ?: 'mail.send';
}

function fail(string $why): never
{
    fwrite(STDERR, "$why\n");
    exit(1);
}

main(array_slice($argv, 1));
