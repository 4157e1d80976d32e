<?php
// Send a prompt from PHP (extension phpredis), and print the answer as it comes.
//
//   php examples/ask.php "The sky is blue because"

declare(strict_types=1);

$pool = getenv('POOL') ?: 'smollm2';
$redis = new Redis();
$redis->connect(getenv('REDIS_HOST') ?: '127.0.0.1', (int) (getenv('REDIS_PORT') ?: 7379));
$redis->setOption(Redis::OPT_READ_TIMEOUT, 15.0); // above the BLOCK of XREAD

$entry = $redis->xAdd("hr:{{$pool}}:q:normal", '*', ['prompt' => $argv[1], 'max_tokens' => '64']);
$log = "hr:{{$pool}}:log:normal-$entry";
$last = '0';

while (true) {
    $reply = $redis->xRead([$log => $last], -1, 10000); // an answer may be slow: ask again
    foreach ($reply[$log] ?? [] as $id => $event) {
        $last = $id;
        if ($event['type'] === 'delta' && ($event['i'] ?? '0') === '0') {
            echo $event['text'];
        } elseif ($event['type'] === 'end') {
            echo "\n";
            if ($event['status'] !== 'done') {
                fwrite(STDERR, $event['status'] . ': ' . ($event['error'] ?? '') . "\n");
                exit(1);
            }
            exit(0);
        }
    }
}
